"""What the results of checks say. Pure. A check that could not be evaluated makes the whole not valid, never a zero."""

import signal

from opengyre.proto.sandbox import CheckResult, ExecResult, VerifyResult
from opengyre.proto.task import Check

OUTPUT_HEAD = 2000
# Signals that come from the kernel's or our limits or from outside; a crash of the checked program is its own doing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGHUP)


def judge(check: Check, result: ExecResult) -> CheckResult:
    """One check: exit status 0 is 1.0, any other is 0.0, unless it did not come to an end of its own."""
    error = None
    if result.timed_out:
        error = f"check {check.name!r} ran into its timeout after {result.duration_s:.1f} s"
    elif result.exit_code is None:
        error = f"check {check.name!r} was killed ({result.killed_by})"
    elif result.exit_code - 128 in _FROM_OUTSIDE:
        error = f"check {check.name!r} was ended by {signal.Signals(result.exit_code - 128).name}"
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
