"""What stands for vLLM and its python in tests, and commands that would start them."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli import up
from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.host.vllm_process import Server

COMMANDS = (
    ("up", "--engine", "vllm"),
    ("demo", "--headless", "--engine", "vllm"),
    ("bench", "router", "--engine", "vllm"),
    ("bench", "engine"),
)


class Alive(Server):
    """A server that never ends by itself, as an engine knows its processes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stopped = False

    async def gone(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True

    def memory(self) -> int:
        return 0 if self.stopped else 1 << 30


def program(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return str(path)


def refused(*arguments: str) -> str:
    """Why a command begins nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(up, "services", lambda *_: pytest.fail("it begins"))
        done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, StackError), done.output
    return str(done.exception)
