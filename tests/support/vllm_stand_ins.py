"""What stands for vLLM and its python in tests, and commands that would start them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from opengyre.cli import up
from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.host import vllm
from opengyre.host.vllm_process import Server
from opengyre.shared.http import app_of, listen, serving_http
from opengyre.shared.settings import HttpSettings

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


@asynccontextmanager
async def instead_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[Request], Awaitable[Response]],
    made: Callable[[str], Alive] = Alive,
) -> AsyncIterator[Alive]:
    """What an engine's start gives while it lasts: a server that answers so. Directories need hold no weights."""
    monkeypatch.setattr(vllm, "check_directory", lambda _: None)
    sock = listen(HttpSettings())
    app = app_of([Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with serving_http(sock, app, shutdown_s=1):
        server = made(f"http://127.0.0.1:{sock.getsockname()[1]}")

        async def start(*_: object) -> Server:
            return server

        monkeypatch.setattr(Server, "start", start)
        yield server


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
