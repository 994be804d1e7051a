"""What follows from an evaluation, when progress is due, and a grader's attempts against a scripted service."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.examples import DISPATCH
from opengyre.proto.run import Scoring
from opengyre.proto.sandbox import CheckResult, SandboxRef, VerifyResult
from opengyre.rollout import grading
from opengyre.rollout.evaluation import LONGEST_PAUSE_S, Verdict, another, pause_s, progress_due, verdict
from opengyre.rollout.grading import Grader
from opengyre.rollout.sandboxes import InvalidCommandError, SandboxFaultError, SandboxLostError
from opengyre.shared.bus import FencedError

REF = SandboxRef(sandbox="s", node="n", isolated=True)


def said(*, valid: bool = True, error: str | None = None) -> VerifyResult:
    parts = (CheckResult(name="a", passed=1.0, weight=0.5, output="x"), CheckResult(name="b", passed=0.0, weight=0.5))
    return VerifyResult(verify_id="v", parts=parts, passed=1, total=2, valid=valid, infra_error=error)


def test_a_verdict_has_parts_or_a_fault() -> None:
    good = verdict(said())
    assert [(part.name, part.weight, part.value, part.output) for part in good.parts] == [
        ("a", 0.5, 1.0, "x"),
        ("b", 0.5, 0.0, ""),
    ]
    assert good.fault is None
    for bad in (said(valid=False), said(valid=False, error="killed"), said(error="killed")):
        assert verdict(bad).parts == ()
        assert verdict(bad).fault == (bad.infra_error or "not every check could be evaluated")


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (Verdict(fault=None), False),
        (Verdict(fault="killed", evaluations=2), True),
        (Verdict(fault="killed", evaluations=3), False),
        (Verdict(fault="invalid", hopeless=True), False),
    ],
)
def test_only_what_failed_and_may_become_well_is_evaluated_again(last: Verdict, expected: bool) -> None:
    assert another(last, 3) is expected


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_s(failed) for failed in range(1, 101)]
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[1] < pauses[2]
    assert pauses[-1] == LONGEST_PAUSE_S


@given(every=st.integers(1, 7), turns=st.integers(0, 40))
def test_progress_is_measured_at_the_start_and_after_every_kth_turn(every: int, turns: int) -> None:
    measured: int | None = None
    found = []
    for calls in range(turns + 1):
        for _ in range(2):  # a call that is asked for again measures nothing again
            if progress_due(every, calls, measured):
                measured = calls
                found.append(calls)
    assert found == list(range(0, turns + 1, every))
    assert not any(progress_due(None, calls, None) for calls in range(turns + 1))


class Service:
    """Answers each evaluation by the next line of its script."""

    def __init__(self, *script: VerifyResult | Exception) -> None:
        self.script = list(script)
        self.asked: list[tuple[str, str]] = []

    async def verify(self, _ref: SandboxRef, _dispatch: object, verify_id: str, mode: str) -> VerifyResult:
        self.asked.append((verify_id, mode))
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @asynccontextmanager
    async def kept(self, _held: Callable[[], SandboxRef], _owner: str, *, at_once: bool) -> AsyncIterator[None]:
        assert at_once
        yield


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    waited: list[int] = []
    monkeypatch.setattr(grading, "pause_s", lambda failed: waited.append(failed) or 0.0)
    return waited


def grader(service: Service, confirm: Callable[[], Any] | None = None, **scoring: object) -> Grader:
    async def ours() -> None:
        pass

    dispatch = msgspec.structs.replace(DISPATCH, scoring=Scoring(**scoring))  # type: ignore[arg-type]  # fields by keyword
    return Grader(service, dispatch, "me", confirm or ours, dispatch.execution)  # type: ignore[arg-type]  # a fake in the service's place


async def test_a_failed_evaluation_is_tried_again_under_another_id(pauses: list[int]) -> None:
    service = Service(said(valid=False, error="killed"), SandboxFaultError("no memory"), said())
    found = await grader(service, grading="shared").final(REF)
    assert (found.fault, found.evaluations, len(found.parts)) == (None, 3, 2)
    assert service.asked == [(f"{DISPATCH.execution}-v{number}", "shared") for number in range(3)]
    assert pauses == [1, 2]


async def test_after_the_budget_there_is_no_score(pauses: list[int]) -> None:
    service = Service(*[said(valid=False, error="killed")] * 5)
    found = await grader(service, attempts=4).final(REF)
    assert (found.fault, found.evaluations, found.parts) == ("killed", 4, ())
    assert {mode for _, mode in service.asked} == {"separate"}
    assert pauses == [1, 2, 3]


async def test_an_error_that_can_never_become_well_is_not_tried_again(pauses: list[int]) -> None:
    service = Service(InvalidCommandError("weight of check 'c' is nan"), said())
    found = await grader(service).final(REF)
    assert (found.fault, found.evaluations) == ("weight of check 'c' is nan", 1)
    assert pauses == []


async def test_a_writer_that_was_replaced_evaluates_nothing_more(pauses: list[int]) -> None:
    left = [None, None]

    async def confirm() -> None:
        if not left:
            raise FencedError("another writer")
        left.pop()

    service = Service(*[said(valid=False, error="killed")] * 5)
    with pytest.raises(FencedError):
        await grader(service, confirm, attempts=5).final(REF)
    assert len(service.asked) == 2


async def test_a_measurement_of_progress_is_one_attempt_and_raises_nothing() -> None:
    for fault in (SandboxLostError("gone"), SandboxFaultError("no memory"), InvalidCommandError("no")):
        service = Service(fault, said())
        found = await grader(service).progress(REF, 4)
        assert (found.fault, found.parts) == (str(fault), ())
        assert service.asked == [(f"{DISPATCH.execution}-p4", "live")]
    assert (await grader(Service(said())).progress(REF, 0)).fault is None
