"""What `stack.json` says of a stack that changes while it is written."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from opengyre.cli import stack as stacks
from opengyre.cli.stack import Stack
from opengyre.cli.up import Running, _keep_file


async def test_what_becomes_ready_while_the_file_is_written_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gyre up --detach` waited five seconds more for a stack that was ready."""
    written: list[bool] = []

    class Supervisor:
        def __init__(self) -> None:
            self.children: dict[str, Any] = {}
            self.lacking = {"gateway": "starting"}
            self.waits = asyncio.Event()

        def missing(self, _: object) -> dict[str, str]:
            return self.lacking

        async def changed(self, _: float) -> None:
            self.waits.set()
            await asyncio.Event().wait()

    supervisor = Supervisor()

    def write(_: Path, stack: Stack) -> None:
        written.append(stack.ready)
        supervisor.lacking = {}

    monkeypatch.setattr(stacks, "write", write)
    stack = Stack(nats="nats://x", valkey=None, gateway="http://y", api_key="k", state_dir=str(tmp_path))
    keeping = asyncio.ensure_future(_keep_file(Running(stack, cast("Any", supervisor), ["gateway"]), tmp_path))
    await supervisor.waits.wait()
    assert written == [False, True]
    keeping.cancel()
    await asyncio.wait([keeping])
