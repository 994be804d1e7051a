"""Tasks of several steps as episodes in real sandboxes: each step asked for, prepared, judged, and continued."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from opengyre.cli.task_files import load_tasks
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import DestroyRequest, DestroyResult
from opengyre.proto.traj import (
    PROGRAM,
    AnyTrajEvent,
    Call,
    Ended,
    SandboxOpened,
    Stepped,
    TakenOver,
    ToolResult,
    Verified,
)
from opengyre.shared.bus import call
from opengyre.trajectory.score import score_of
from support import eventually
from support.foreign_tasks import STEPS_TASK, write
from support.rollout_fakes import FakeHost, Stack, dispatch
from support.sandboxes import on_images

pytestmark = on_images


@pytest.fixture
def stack(host_stack: Stack) -> Stack:
    return host_stack


def episode(stack: Stack, files: dict[str, str] | None = None, **harness: object) -> EpisodeDispatch:
    """The task of two steps, where ``files`` replace its own."""
    (task,) = load_tasks(write(stack.folder / "task", STEPS_TASK | (files or {})))
    assert [step.name for step in task.steps] == ["one", "two"]
    return msgspec.structs.replace(dispatch(**{"max_turns": 3, **harness}), task=task)  # type: ignore[arg-type]  # fields by keyword, checked at run time


def host(stack: Stack, *first: str) -> FakeHost:
    """Says one of these as the first words of a conversation, a further one in each, and then that it is done."""
    made = stack.host("h0", ["", "done"])
    made.alternatives = {0: list(first)}
    return made


def of(kind: type, log: list[AnyTrajEvent]) -> Iterator[Any]:
    return (event for event in log if isinstance(event, kind))


async def lived(stack: Stack, made: EpisodeDispatch, *first: str) -> list[AnyTrajEvent]:
    async with host(stack, *first).up(), stack.service():
        await stack.submit(made)
        await eventually(lambda: stack.ended(made), 120)
        return await stack.log(made)


async def test_each_step_is_a_conversation_of_its_own_in_the_same_sandbox(stack: Stack) -> None:
    # The same instruction twice: the same first request, and not the same call.
    made = episode(stack, {"steps/one/instruction.md": "Go on.\n", "steps/two/instruction.md": "Go on.\n"})
    log = await lived(stack, made, "touch first; (sleep 60 &)", "cp given second")
    assert [event.step for event in log if event.step != 0] == [1] * sum(event.step == 1 for event in log)
    assert [(event.step, event.name) for event in of(Stepped, log)] == [(0, "one"), (1, "two")]
    assert [(event.step, event.command) for event in of(ToolResult, log)] == [
        (0, "touch first; (sleep 60 &)"),
        (1, "cp given second"),
    ]
    calls = list(of(Call, log))
    assert [event.step for event in calls] == [0, 0, 1, 1]
    assert len({event.request_digest for event in calls}) == 4
    assert calls[2].prefix_tokens < len(calls[0].prompt_ids) + len(calls[0].sampled_ids)
    first, last = of(Verified, log)
    assert (first.step, first.goes_on, last.step, last.goes_on) == (0, True, 1, False)
    assert [(part.name, part.value, part.weight) for part in last.parts] == [
        ("one.reward", 1.0, 0.5),
        ("two.reward", 1.0, 0.5),
    ]
    assert isinstance(log[-1], Ended)
    assert (log[-1].reason, log[-1].turns) == ("done", 4)


async def test_a_step_that_earns_too_little_is_the_last(stack: Stack) -> None:
    log = await lived(stack, episode(stack), "touch other")
    assert [event.name for event in of(Stepped, log)] == ["one"]
    (verified,) = of(Verified, log)
    assert [(part.name, part.value, part.output) for part in verified.parts] == [
        ("one.reward", 0.0, ""),
        ("two.reward", 0.0, "not reached"),
    ]
    assert score_of(verified.parts) == 0.0


async def test_a_setup_that_fails_leaves_the_execution_unjudged(stack: Stack) -> None:
    made = episode(stack, {"steps/two/workdir/setup.sh": "echo no; exit 3\n"})
    log = await lived(stack, made, "touch first")
    *_, verified = of(Verified, log)
    assert (verified.parts, verified.infra_error) == ((), "step two: the setup of the step failed, exit status 3: no")
    assert isinstance(log[-1], Ended)
    assert log[-1].reason == "agent_error"


async def test_the_program_of_an_agent_is_started_once_a_step(stack: Stack) -> None:
    program = 'case "$GYRE_INSTRUCTION" in First.) touch first;; *) cp given second;; esac; echo $GYRE_INSTRUCTION'
    log = await lived(stack, episode(stack, agent="program", program=program), "")
    ran = [(event.step, event.turn, event.output) for event in of(ToolResult, log)]
    assert ran == [(0, PROGRAM, "First."), (1, PROGRAM, "Second.")]
    *_, verified = of(Verified, log)
    assert score_of(verified.parts) == 1.0


async def test_another_writer_goes_on_in_the_step_that_the_log_says(stack: Stack) -> None:
    """Whatever of it was stored, and with the sandbox gone meanwhile: the steps before are done again."""
    made = episode(stack, {"steps/one/workdir/setup.sh": "echo x >> began\n"})
    second = "cp given second; cat began"

    async def at(kind: type, step: int) -> bool:
        return any(event.step == step for event in of(kind, await stack.log(made)))

    async with host(stack, "touch first", second, second, second, second).up():
        for replica, (kind, step), lose in (
            ("one", (Stepped, 0), False),
            ("two", (Verified, 0), True),
            ("three", (Stepped, 1), False),
            ("four", (ToolResult, 1), True),
        ):
            async with stack.service(replica):
                if replica == "one":
                    await stack.submit(made)
                await eventually(lambda kind=kind, step=step: at(kind, step), 120)
            if lose:
                *_, opened = of(SandboxOpened, await stack.log(made))
                request = DestroyRequest(sandbox=opened.sandbox)
                await call(
                    stack.bus, "sandbox", opened.node, "destroy", request, DestroyResult, timeout_s=20, patience_s=5
                )
        async with stack.service("five"):
            await eventually(lambda: stack.ended(made), 120)
        log = await stack.log(made)
    assert len(list(of(TakenOver, log))) >= 2
    assert [event.name for event in of(Stepped, log)] == ["one", "two"]
    assert [(event.step, event.output) for event in of(ToolResult, log)] == [(0, ""), (1, "x")]
    assert len(list(of(SandboxOpened, log))) >= 2
    *_, verified = of(Verified, log)
    assert (verified.infra_error, score_of(verified.parts)) == (None, 1.0)
    assert next(of(Ended, log)).reason == "done"
