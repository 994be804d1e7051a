"""The rollout service as a process that is killed and stopped with episodes under way (law 1)."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from opengyre.proto import subjects
from opengyre.proto.sandbox import ExecRequest, ExecResult
from opengyre.proto.service import ServiceStatus
from opengyre.proto.traj import AnyTrajEvent, Call, Ended, TakenOver, ToolResult
from opengyre.shared.bus import Bucket
from support import eventually
from support.rollout_fakes import Stack, dispatch

SCRIPT = ["echo one > a.txt", "cat b.txt", "cp a.txt b.txt", "done"]
EPISODES = 6


@contextlib.contextmanager
def process(stack: Stack, name: str) -> Iterator[subprocess.Popen[bytes]]:
    env = {
        **os.environ,
        "GYRE_STATE_DIR": str(stack.folder / "state"),
        "GYRE_BUS__URL": stack.nats_url,
        "GYRE_ROLLOUT__SANDBOX_TTL_S": "30",
    }
    with (stack.folder / f"{name}.log").open("wb") as out:
        running = subprocess.Popen([sys.executable, "-m", "opengyre.rollout"], env=env, stdout=out, stderr=out)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.wait(60)


async def ready(stack: Stack, running: subprocess.Popen[bytes]) -> None:
    async with Bucket(stack.bus, subjects.KV_SERVICES, ServiceStatus).view() as services:
        await eventually(lambda: any(s.pid == running.pid and s.ready for s in services.values.values()), 90)


def story(events: list[AnyTrajEvent]) -> list[tuple[str, object]]:
    """What happened, whoever wrote it."""
    told: list[tuple[str, object]] = []
    for event in events:
        if isinstance(event, Call):
            told.append(("call", (event.call, event.text, event.sampled_ids, event.prefix_tokens, event.prompt_ids)))
        elif isinstance(event, ToolResult):
            told.append(("tool", (event.exec_id, event.command, event.output)))
        elif isinstance(event, Ended):
            told.append(("ended", (event.reason, event.turns, event.sampled_tokens)))
    return told


async def test_kill_9_and_a_stop_lose_no_turn(stack: Stack) -> None:
    """Killed in the midst of calls and commands, continued, handed over by SIGTERM: every episode is as if nothing
    had been, each command ran once, in one sandbox."""
    reference = dispatch(number=99)
    episodes = [dispatch(number=n) for n in range(EPISODES)]
    host = stack.host("h0", SCRIPT)
    run, go_on = stack.sandboxes._run, asyncio.Event()
    go_on.set()

    async def held(request: ExecRequest) -> ExecResult:
        done = await run(request)
        await go_on.wait()
        return done

    stack.sandboxes._run = held  # type: ignore[method-assign]  # commands that last for as long as it takes
    async with host.up():
        with process(stack, "one") as one:
            await ready(stack, one)
            await stack.submit(reference)
            await eventually(lambda: stack.ended(reference))
            host.delay_s, stack.sandboxes.delay_s = 0.06, 0.25
            for episode in episodes:
                await stack.submit(episode)
                await asyncio.sleep(0.1)
            await eventually(lambda: host.calls and len(stack.sandboxes.ran) > 3 + 2)
            one.kill()
        go_on.clear()  # so that episodes are still under way when the third has started
        with process(stack, "two") as two:
            await ready(stack, two)

            async def continued() -> bool:
                taken = await stack.bus.subjects(subjects.TRAJ, "gyre.v1.traj.*.*.*.taken_over")
                return len(taken) >= EPISODES - 1

            await eventually(continued, 90)
            with process(stack, "three") as three:
                await ready(stack, three)
                two.send_signal(signal.SIGTERM)
                stack.sandboxes.delay_s = 0.05
                go_on.set()
                await eventually(stack.drained, 90)
                assert await asyncio.to_thread(two.wait, 60) == 0
    expected = story(await stack.log(reference))
    attempts: set[int] = set()
    for episode in episodes:
        events = await stack.log(episode)
        assert [event.index for event in events] == list(range(len(events)))
        attempts |= {event.attempt for event in events if isinstance(event, TakenOver)}
        told = [
            (kind, tuple(str(part).replace(episode.execution, reference.execution) for part in parts))  # type: ignore[arg-type]  # calls and their parts are plain here
            for kind, parts in story(events)
        ]
        assert told == [(kind, tuple(str(part) for part in parts)) for kind, parts in expected]  # type: ignore[union-attr]  # calls and their parts are plain here
    assert 1 in attempts
    assert 2 in attempts, "an episode was handed over by the stop"
    assert len(stack.sandboxes.ran) == len(set(stack.sandboxes.ran)) == 3 * (EPISODES + 1)
    assert set(stack.sandboxes.created.values()) == {1}
    assert not stack.sandboxes.live
