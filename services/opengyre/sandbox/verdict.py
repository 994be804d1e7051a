"""What the results of checks, and the files that tests leave, say. Pure.

What could not be evaluated makes the whole not valid, never a zero: a verifier that was killed, ran out of memory, was
late or left nothing that can be read.
"""

import math
import signal
from collections.abc import Mapping

import msgspec

from opengyre.proto.sandbox import CheckResult, ExecResult, TestOutcome, VerifyResult
from opengyre.proto.task import Check, TaskTests
from opengyre.tasks.errors import TaskError
from opengyre.tasks.reports import Report, merged, read_report
from opengyre.tasks.rewards import progress, read_rewards
from opengyre.tasks.terminal_bench import read_pytest_summary

OUTPUT_HEAD = 2000
REPORTED = 500
# Signals that come from the kernel's or our limits or from outside; a crash of the checked program is its own doing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGHUP)


def interrupted(what: str, result: ExecResult) -> str | None:
    """Why a command did not come to an end of its own; None where it did."""
    if result.timed_out:
        return f"{what} ran into its timeout after {result.duration_s:.1f} s"
    if result.exit_code is None:
        return f"{what} was killed ({result.killed_by})"
    if result.exit_code - 128 in _FROM_OUTSIDE:
        memory = " as its sandbox was out of memory" if result.oom else ""
        return f"{what} was ended by {signal.Signals(result.exit_code - 128).name}{memory}"
    return None


def judge(check: Check, result: ExecResult) -> CheckResult:
    """One check: exit status 0 is 1.0, any other is 0.0, unless it did not come to an end of its own."""
    error = interrupted(f"check {check.name!r}", result)
    passed = 1.0 if error is None and result.exit_code == 0 else 0.0
    output = (result.stdout + result.stderr)[:OUTPUT_HEAD]
    return CheckResult(name=check.name, passed=passed, weight=check.weight, output=output, error=error)


def verdict(verify_id: str, parts: list[CheckResult], total: int, *, isolated: bool) -> VerifyResult:
    """All checks, in order; ``parts`` ends with the one that could not be evaluated, if any."""
    error = next((part.error for part in parts if part.error is not None), None)
    if error is None and len(parts) < total:
        error = f"only {len(parts)} of {total} checks were evaluated"
    return VerifyResult(
        verify_id=verify_id,
        parts=tuple(parts),
        passed=sum(1 for part in parts if part.passed),
        total=total,
        valid=error is None,
        infra_error=error,
        isolated=isolated,
    )


def weighed(rewards: Mapping[str, float], weights: Mapping[str, float]) -> tuple[CheckResult, ...]:
    """The rewards as parts of a score; raises `TaskError` for one that is no share of it."""
    for name, value in rewards.items():
        if not 0 <= value <= 1:
            raise TaskError(f"reward {name!r} is {value:g}; allowed for a score is 0 to 1")
    for name in weights:
        if name not in rewards:
            raise TaskError(f"reward {name!r} has a weight but the tests left only {', '.join(map(repr, rewards))}")
    shares = {name: weights.get(name, 1.0) for name in rewards}
    whole = math.fsum(shares.values())
    return tuple(CheckResult(name=name, passed=rewards[name], weight=share / whole) for name, share in shares.items())


def of_tests(
    tests: TaskTests, verify_id: str, ran: ExecResult, files: Mapping[str, bytes], *, isolated: bool
) -> VerifyResult:
    """What a verifier's run and the files that it left, by name, say."""
    error = interrupted("the verifier", ran)
    if error is None and ran.oom:
        # Something of it was ended for memory, though it went on: what it then found is not the work's doing.
        error = "the verifier ran out of memory"
    said = VerifyResult(
        verify_id=verify_id, parts=(), passed=0, total=0, valid=False, infra_error=error, isolated=isolated,
        baseline=tests.baseline, output=(ran.stdout + ran.stderr)[-OUTPUT_HEAD:],
    )  # fmt: skip
    if error is not None:
        return said
    try:
        return _read(tests, said, ran, files)
    except TaskError as fault:
        return msgspec.structs.replace(said, infra_error=str(fault))


def _read(tests: TaskTests, said: VerifyResult, ran: ExecResult, files: Mapping[str, bytes]) -> VerifyResult:
    if tests.parser == "pytest":
        report = read_pytest_summary(ran.stdout)
        rewards = {"reward": 1.0 if report.total and report.passed == report.total else 0.0}
    else:
        rewards = read_rewards(files)
        report = _report(files, needed=tests.score == "progress")
    counts = (report.passed, report.total) if report is not None else None
    done = progress(*counts, tests.baseline) if counts is not None else None
    if tests.score == "progress":
        if done is None:
            raise TaskError("the tests left no report in /logs/verifier; score = 'progress' needs one (CTRF or JUnit)")
        parts = (CheckResult(name="progress", passed=done, weight=1.0),)
    else:
        parts = weighed(rewards, tests.weights)
    return msgspec.structs.replace(
        said,
        parts=parts,
        rewards=rewards,
        passed=counts[0] if counts else sum(value >= 1 for value in rewards.values()),
        total=counts[1] if counts else len(rewards),
        progress=done,
        report=tuple(TestOutcome(name=t.name, outcome=t.outcome) for t in report.tests[:REPORTED]) if report else (),
        valid=True,
    )


def _report(files: Mapping[str, bytes], *, needed: bool) -> Report | None:
    """The tests of every report; None where there is none, or where one cannot be read and none is needed."""
    found = []
    for name in sorted(files):
        try:
            report = read_report(name, files[name])
        except TaskError:
            if needed:
                raise
            return None
        if report is not None:
            found.append(report)
    return merged(found) if found else None
