"""A node with bubblewrap sandboxes for tests, and what is left of it, counted on the system itself."""

import ast
import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto.sandbox import ExecRequest, ExecResult, SandboxRef, SandboxSpec, VerifyRequest, VerifyResult
from opengyre.proto.task import Check
from opengyre.sandbox import machine, processes
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import Options, Spec
from opengyre.sandbox.manager import Manager
from support import eventually

DEFAULTS = Spec(sandbox="", workspace_mb=16, memory_mb=256, pids=64)
needs_sandboxes = pytest.mark.skipif(
    machine.find_bwrap() is None or machine.user_namespaces() is not None,
    reason="needs bubblewrap and user namespaces",
)
on_images = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        machine.find_bwrap() is None or machine.user_namespaces() is not None or os.geteuid() != 0,
        reason="needs bubblewrap, and root for images",
    ),
]
"""Of a suite whose sandboxes are made of images."""
PYTHON = "/usr/bin/python3"
needs_python = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="what is tried is written in Python, and sandboxes see the machine's /usr"
)


class Node:
    """A manager on a folder; it can be stopped and another one started on the same folder."""

    def __init__(self, root: Path, defaults: Spec = DEFAULTS, **more: Any) -> None:
        self.root = root
        self.backend = Bubblewrap(root)
        self.manager = Manager(self.backend, "n0", defaults, **more)

    async def create(self, name: str = "s", **more: Any) -> SandboxRef:
        fields: dict[str, Any] = {"sandbox": name, "owner": "test"} | more
        return await self.manager.create(SandboxSpec(**fields))

    async def run(
        self, command: str, *, sandbox: str = "s", timeout_s: float = 20.0, limit: int = 16384, exec_id: str = ""
    ) -> ExecResult:
        request = ExecRequest(
            sandbox=sandbox,
            exec_id=exec_id or f"e{uuid.uuid4().hex[:12]}",
            command=command,
            timeout_s=timeout_s,
            output_limit=limit,
        )
        return await self.manager.exec(request)

    async def verify(self, *commands: str, timeout_s: float = 10.0, name: str = "v", **more: Any) -> VerifyResult:
        checks = tuple(Check(name=f"c{n}", command=text, weight=1.0) for n, text in enumerate(commands))
        request = VerifyRequest(sandbox="s", verify_id=name, checks=checks, timeout_s=timeout_s, **more)
        return await self.manager.verify(request)

    def first(self, sandbox: str = "s") -> int:
        """Process id of a sandbox's first process, as this test sees it."""
        return self.backend._live[sandbox].pid

    def left(self) -> list[str]:
        """Processes, cgroups, mounts and folders that are there of any sandbox of this node."""
        return left_of(self.root, self.backend)

    async def close(self) -> None:
        """Remove everything, and see that it is gone."""
        for info in self.manager.listing({}):
            await self.manager.destroy(info.sandbox)
        await self.manager.stop()


def names_of_tests(suite: Path) -> set[str]:
    """Names of all tests of sandboxes below a folder."""
    found: set[str] = set()
    for path in sorted(suite.rglob("test_*sandbox*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.AsyncFunctionDef, ast.FunctionDef)
        found |= {one.name for one in ast.walk(tree) if isinstance(one, kinds) and one.name.startswith("test_")}
    return found


def left_of(root: Path, backend: Bubblewrap) -> list[str]:
    """As `Node.left`; ``backend`` only tells the marker's key."""
    key = backend.marker("")
    found = [f"process {pid} marked {value}" for pid, value in processes._marked() if value.startswith(key)]
    found += [f"cgroup {path}" for path in groups_of(key)]
    found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]
    for kind in ("sandboxes", "trash"):
        if (root / kind).is_dir():
            found += [f"folder {path}" for path in (root / kind).iterdir()]
    return found


def groups_of(key: str) -> list[Path]:
    """Folders of sandboxes in any mounted hierarchy; ``key`` is that of the node, with or without its dot."""
    name = f"gyre-{key.rstrip('.')}"
    tops = [path for path in walk_groups() if path.name == name]
    return [path for top in tops for path in top.iterdir() if path.is_dir()]


def walk_groups() -> list[Path]:
    """Every cgroup folder down to three levels; deeper ones are nobody's here."""
    found: list[Path] = []
    level = [
        Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines() if "cgroup" in line
    ]
    for _ in range(4):
        below: list[Path] = []
        for folder in level:
            try:
                below += [path for path in folder.iterdir() if path.is_dir()]
            except OSError:
                continue
        found += below
        level = below
    return found


def attached(log: Path) -> list[int]:
    """Processes whose standard error is that file: a launcher and all that it forked."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "fd" / "2").readlink() == log:
                    found.append(int(process.name))
            except OSError:
                continue
    return found


@asynccontextmanager
async def node(root: Path, defaults: Spec = DEFAULTS, **more: Any) -> AsyncIterator[Node]:
    """A node that leaves nothing, or the test fails."""
    made = Node(root, defaults, **more)
    await made.manager.start()
    try:
        yield made
    finally:
        await made.close()
    # A command's monitor ends just after it has answered.
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: made.left() == [], 30.0)
    assert made.left() == []


class Shell:
    """Commands in one sandbox."""

    def __init__(self, backend: Bubblewrap, spec: Spec) -> None:
        self.backend = backend
        self.spec = spec
        self.count = 0

    async def __call__(self, command: str, **options) -> str:
        self.count += 1
        done = await self.backend.exec(
            self.spec, f"x{self.count}", command, 20.0, 16384, Options(**options) if options else Options()
        )
        return f"{done.stdout}{done.stderr}{'' if done.exit_code == 0 else f'[{done.exit_code}]'}"
