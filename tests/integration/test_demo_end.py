"""`gyre demo` and its stack, interrupted: phases of ours in their place, which take their time to end."""

import asyncio
import contextlib
import io
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from opengyre.cli import demo, supervisor, up
from opengyre.cli import stack as stacks
from opengyre.cli.demo import Demo, until_signal
from opengyre.cli.demo_plan import DemoOptions
from opengyre.cli.stack import Stack, StackError
from opengyre.cli.supervisor import Supervisor
from opengyre.shared.settings import Settings

TITLE = "OpenGyre demo: "


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=written, force_terminal=True, width=120, highlight=False))
    return written


def interrupted(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, options: DemoOptions, fault: str = "") -> int:
    """Ctrl-C once the view shows the training; its phases end when it shows that it stops."""

    async def drawn(text: str) -> None:
        async with asyncio.timeout(60):
            while text not in screen.getvalue():  # noqa: ASYNC110 - the view tells nobody that it draws
                await asyncio.sleep(0.01)

    class Trains(Demo):
        async def _phases(self) -> dict[str, object]:
            with self._phase("train"):
                options.state_dir.mkdir()
                (options.state_dir / stacks.FILE).touch()
                await drawn(f"{TITLE}train")
                os.kill(os.getpid(), signal.SIGINT)
                try:
                    await asyncio.Event().wait()
                finally:
                    await drawn(f"{TITLE}stopping")
                    if fault:
                        raise StackError(fault)
            return {}

    monkeypatch.setattr(demo, "Demo", Trains)
    return asyncio.run(until_signal(options, Settings(), live=True, json=False))


def test_a_demo_that_is_interrupted_says_that_it_stops_and_in_the_end_what_is_left(
    monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, tmp_path: Path
) -> None:
    options = DemoOptions(state_dir=tmp_path / "state")
    assert interrupted(monkeypatch, screen, options) == 130
    said = screen.getvalue()
    assert said.index("stopping, which takes some seconds") < said.index(f"{TITLE}stopping")
    assert said.endswith(
        f"stopped; nothing runs any more; its state is in {options.state_dir}, "
        "and the same command with --keep goes on from there\n"
    )


def test_a_demo_that_leaves_something_where_it_is_interrupted_says_so(
    monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, tmp_path: Path
) -> None:
    with pytest.raises(StackError, match="sandboxes may be left"):
        interrupted(monkeypatch, screen, DemoOptions(state_dir=tmp_path / "state"), "sandboxes may be left")
    assert "nothing runs any more" not in screen.getvalue()


async def test_a_stack_whose_block_is_cancelled_ends_its_sandboxes_too(
    monkeypatch: pytest.MonkeyPatch, nats_server: Any, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    alone = Stack(
        nats=nats_server.url, valkey=None, gateway="http://127.0.0.1:1", api_key=None, state_dir=str(state),
        supervisor_pid=os.getpid(),
    )  # fmt: skip
    monkeypatch.setattr(up, "compose", lambda *_: (alone, [], []))
    ended: list[Path] = []

    async def end_sandboxes(directory: Path) -> list[str]:
        ended.append(directory)
        return []

    monkeypatch.setattr(up, "end_sandboxes", end_sandboxes)
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()
    write = stacks.write
    last, written = threading.Event(), threading.Event()

    def slow(directory: Path, content: Stack) -> None:
        """Cancelled while it writes, it writes all the same."""
        if content.supervisor_pid:
            loop.call_soon_threadsafe(inside.set)
            last.wait(1)
            write(directory, content)
            written.set()
        else:
            write(directory, content)
            last.set()

    monkeypatch.setattr(stacks, "write", slow)

    async def live() -> None:
        async with up.running(up.Options(state), Settings(), lambda _: None):
            await asyncio.Event().wait()

    task = asyncio.create_task(live())
    async with asyncio.timeout(60):
        await inside.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert ended == [state]
    assert await asyncio.to_thread(written.wait, 60)
    left = stacks.read(state)
    assert left is not None
    assert left.supervisor_pid == 0


class Losing:
    """A connection whose making loses its cancellation, as `asyncio.wait_for` of Python 3.11 may."""

    def __init__(self, connecting: asyncio.Event) -> None:
        self.lost = asyncio.Event()
        self.connected = False
        self._connecting = connecting

    async def __aenter__(self) -> "Losing":
        self._connecting.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass


class Empty:
    """A bucket in which nothing is and nothing comes."""

    values: ClassVar[dict[str, object]] = {}

    def __init__(self, *_: object) -> None:
        pass

    @contextlib.asynccontextmanager
    async def view(self) -> AsyncIterator["Empty"]:
        yield self

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s / 100)


async def test_a_stack_that_is_stopped_while_it_connects_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    connecting = asyncio.Event()
    monkeypatch.setattr(supervisor, "Bus", lambda *_: Losing(connecting))
    monkeypatch.setattr(supervisor, "Bucket", Empty)
    async with asyncio.timeout(60), Supervisor(tmp_path, lambda _: None) as running:
        running.follow("nats://127.0.0.1:1")
        await connecting.wait()
