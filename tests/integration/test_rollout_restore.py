"""A sandbox that is gone when a writer takes over (a stack that was down, a machine that was lost) is made again."""

import asyncio
from typing import Any

import msgspec

from opengyre.proto.sandbox import ExecRequest, ExecResult, VerifyRequest, VerifyResult
from opengyre.proto.traj import Ended, SandboxOpened, ToolResult, Verified
from support import eventually
from support.rollout_fakes import Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat a.txt", "cp a.txt b.txt", "done"]


async def lose_in_the_middle(stack: Stack, number: int, exit_code: int) -> list[Any]:
    """Stop a replica after two commands, lose the sandbox, let another replica go on, where commands end with
    `exit_code` and print something else; the log."""
    episode = dispatch(number=number)
    sandboxes = stack.sandboxes
    ran: list[tuple[str, str]] = []
    run = sandboxes._run

    async def counted(request: ExecRequest) -> ExecResult:
        ran.append((request.exec_id, request.command))
        return msgspec.structs.replace(await run(request), exit_code=code)

    code = 0
    sandboxes._run = counted  # type: ignore[method-assign]  # a fault is put in from outside
    sandboxes.print = {"cat a.txt": "one"}
    async with stack.host("h0", SCRIPT).up():
        sandboxes.delay_s = 0.2
        async with stack.service("one"):
            await stack.submit(episode)
            await eventually(lambda: len(ran) >= 3, 60)
        sandboxes.lose()
        sandboxes.delay_s = 0.0
        sandboxes.print, code = {"cat a.txt": "two"}, exit_code
        before = len(ran)
        async with stack.service("two"):
            await eventually(lambda: stack.ended(episode), 60)
    assert sandboxes.created == {episode.execution: 1, f"{episode.execution}-a1": 1}
    assert [command for _, command in ran[before:]][: 1 if exit_code else 2] == SCRIPT[: 1 if exit_code else 2]
    await asyncio.sleep(0)
    return await stack.log(episode)


async def test_what_was_done_is_done_again_and_the_episode_goes_on(stack: Stack) -> None:
    log = await lose_in_the_middle(stack, 1, 0)
    assert sum(isinstance(event, SandboxOpened) for event in log) == 2
    tools = [event for event in log if isinstance(event, ToolResult)]
    assert [event.command for event in tools] == SCRIPT[:3]
    assert tools[1].output == "one"  # the log is not rewritten
    assert [event.turn for event in tools] == sorted({event.turn for event in tools})
    verified = next(event for event in log if isinstance(event, Verified))
    assert verified.infra_error is None
    assert isinstance(log[-1], Ended)
    assert log[-1].reason == "done"


async def test_a_command_that_ends_in_another_way_ends_the_episode_as_ours(stack: Stack) -> None:
    log = await lose_in_the_middle(stack, 2, 1)
    assert isinstance(log[-1], Ended)
    assert log[-1].reason == "infra"
    assert "ended in another way" in (log[-1].detail or "")


async def test_a_sandbox_that_was_left_half_restored_is_not_taken_for_the_episodes(stack: Stack) -> None:
    episode = dispatch(number=3)
    sandboxes = stack.sandboxes
    async with stack.host("h0", SCRIPT).up():
        sandboxes.delay_s = 0.2
        async with stack.service("one"):
            await stack.submit(episode)
            await eventually(lambda: len(sandboxes.ran) >= 3, 60)
        sandboxes.lose()
        before = len(sandboxes.ran)
        async with stack.service("two"):
            await eventually(lambda: len(sandboxes.ran) > before, 60)
        assert sum(isinstance(event, SandboxOpened) for event in await stack.log(episode)) == 1
        before = len(sandboxes.ran)
        async with stack.service("three"):
            await eventually(lambda: stack.ended(episode), 60)
    again = [f"{episode.execution}-t{turn}" for turn in range(3)]
    assert sandboxes.ran[before:] == again, "every command, in a new sandbox"
    log = await stack.log(episode)
    assert isinstance(log[-1], Ended)
    assert log[-1].reason == "done"


async def test_the_lease_is_kept_while_the_checks_run(stack: Stack) -> None:
    """They may together take longer than it lasts, and a sandbox that is reaped under them is no verdict."""
    episode = dispatch(number=4)
    sandboxes = stack.sandboxes
    verify = sandboxes.verify

    async def slow(request: VerifyRequest) -> VerifyResult:
        await eventually(lambda: sandboxes.renewed[request.sandbox] >= 2, 60)
        return await verify(request)

    sandboxes.verify = slow  # type: ignore[method-assign]  # a fault is put in from outside
    async with stack.host("h0", ["done"]).up(), stack.service("one", sandbox_ttl_s=5):
        await stack.submit(episode)
        await eventually(lambda: stack.ended(episode), 60)
    verified = next(event for event in await stack.log(episode) if isinstance(event, Verified))
    assert verified.infra_error is None
