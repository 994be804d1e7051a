"""A node of either backend for tests: what they share is asked of both."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiodocker
import aiohttp
import pytest

from opengyre.proto.sandbox import ExecRequest, ExecResult, SandboxRef, SandboxSpec, VerifyRequest
from opengyre.proto.task import Check
from opengyre.sandbox import docker_config, machine, processes
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import Options, SandboxGone, Spec
from opengyre.sandbox.docker import Docker
from opengyre.sandbox.manager import Manager

DEFAULTS = Spec(sandbox="", workspace_mb=16, memory_mb=256, pids=64)
SOCKET = Path(urlsplit(os.environ.get("DOCKER_HOST", "")).path or "/var/run/docker.sock")
IMAGE = os.environ.get("TEST_SANDBOX_IMAGE", "gyre-test:base")


async def _engine() -> str | None:
    """Why the engine cannot be used, None where it can."""
    if not SOCKET.is_socket():  # noqa: ASYNC240 - one look, before anything else runs
        return f"no Docker engine at {SOCKET} (DOCKER_HOST says where one is)"
    connector = aiohttp.UnixConnector(str(SOCKET))
    try:
        async with aiodocker.Docker(url="unix://localhost", connector=connector) as docker:
            await docker.images.inspect(IMAGE)
    except aiodocker.DockerError as error:
        return f"no image {IMAGE} on the Docker engine at {SOCKET} (TEST_SANDBOX_IMAGE names another): {error.message}"
    finally:
        await connector.close()
    return None if os.geteuid() == 0 else "the Docker backend is root's"


def missing(kind: str) -> str | None:
    """Why a backend cannot be tried here, None where it can."""
    if kind == "bubblewrap":
        return machine.user_namespaces() or (None if machine.find_bwrap() else "needs bubblewrap")
    return asyncio.run(_engine())


def backend(kind: str, root: Path) -> Bubblewrap | Docker:
    """A backend that was not started."""
    return Bubblewrap(root) if kind == "bubblewrap" else Docker(root, socket=SOCKET, image=IMAGE)


class Node:
    """A manager over a backend, and short ways to ask it."""

    def __init__(self, kind: str, root: Path, defaults: Spec = DEFAULTS) -> None:
        self.kind = kind
        self.root = root
        self.backend = backend(kind, root)
        self.manager = Manager(self.backend, "n0", defaults)

    async def create(self, name: str, **more: Any) -> SandboxRef:
        fields: dict[str, Any] = {"sandbox": name, "owner": "test"} | more
        return await self.manager.create(SandboxSpec(**fields))

    def spec(self, name: str) -> Spec:
        return self.manager._known[name].spec

    async def left(self) -> list[str]:
        """Processes and containers that are there of any sandbox of this node, and folders."""
        marker = f"{self.backend._key}."
        found = [value for _, value in processes._marked() if value.startswith(marker)]
        if isinstance(self.backend, Docker):
            label = f'{{"label": ["{docker_config.KEY_LABEL}={self.backend._key}"]}}'
            containers = await self.backend._engine.docker.containers.list(all=1, filters=label)
            found += [container.id for container in containers]
        return found + [path.name for kind in ("sandboxes", "trash") for path in (self.root / kind).iterdir()]

    async def break_(self, name: str) -> None:
        """End a sandbox from outside, as a machine's fault would."""
        if isinstance(self.backend, Docker):
            await self.backend._engine.container(self.backend._live[name].container).kill()
        else:
            record = self.backend._live[name]
            processes.kill(record.pid, record.started)


class Box:
    """A sandbox of its own on a node."""

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.name = name

    @property
    def spec(self) -> Spec:
        return self.node.spec(self.name)

    async def run(self, command: str, timeout_s: float = 30.0, limit: int = 16384, exec_id: str = "") -> ExecResult:
        request = ExecRequest(
            sandbox=self.name,
            exec_id=exec_id or f"e{uuid.uuid4().hex[:12]}",
            command=command,
            timeout_s=timeout_s,
            output_limit=limit,
        )
        return await self.node.manager.exec(request)

    async def run_so(self, command: str, timeout_s: float = 30.0, **options: Any) -> ExecResult:
        """Run with options that are the backend's."""
        exec_id = f"o{uuid.uuid4().hex[:12]}"
        return await self.node.backend.exec(self.spec, exec_id, command, timeout_s, 16384, Options(**options))

    async def count(self, words: str) -> int:
        """How many processes in the sandbox show these words as their command line."""
        pattern = words.replace(".", "[.]")
        # The pattern itself does not match, so that the one that looks is not counted.
        every = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null"
        done = await self.run(f"{every} | grep -cE '^(/bin/)?{pattern}'")
        return int(done.stdout)

    async def sees(self, words: str) -> None:
        """Wait until such a process is there."""

        async def there() -> bool:
            return await self.count(words) > 0

        await until(there)


async def until(condition: Callable[[], Awaitable[bool]], bound_s: float = 30.0) -> None:
    """What is waited for is state of the system; it has no event."""
    async with asyncio.timeout(bound_s):
        while not await condition():  # noqa: ASYNC110 - state of the system, which has no event
            await asyncio.sleep(0.02)


N = TypeVar("N", bound=Node)


@asynccontextmanager
async def started(kind: str, root: Path) -> AsyncIterator[Node]:
    """A node that is ready; afterwards nothing is left of it."""
    async with ready(Node(kind, root)) as node:
        yield node


@asynccontextmanager
async def ready(node: N) -> AsyncIterator[N]:
    """The same, of a node that was not started."""
    await node.manager.start()
    try:
        yield node
    finally:
        for info in node.manager.listing({}):
            with suppress(SandboxGone):
                await node.manager.destroy(info.sandbox)
        left = await node.left()
        await node.manager.stop()
    assert left == [], left


needs = {kind: pytest.mark.skipif(bool(why := missing(kind)), reason=str(why)) for kind in ("bubblewrap", "docker")}
BOTH = [pytest.param(kind, marks=marks, id=kind) for kind, marks in needs.items()]


def checks(name: str, sandbox: str, mode: str, *commands: str) -> VerifyRequest:
    """A request to run these commands as checks."""
    made = tuple(Check(name=f"c{n}", command=text, weight=1.0) for n, text in enumerate(commands))
    return VerifyRequest(sandbox=sandbox, verify_id=name, checks=made, mode=mode)  # type: ignore[arg-type]  # one of the modes
