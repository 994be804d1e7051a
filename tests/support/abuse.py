"""A node of either backend, with a sandbox in which things are tried that must fail."""

import uuid
from typing import Any

from opengyre.proto.sandbox import ExecRequest, ExecResult, SandboxRef, VerifyResult
from support import both_backends
from support.both_backends import checks


class Node(both_backends.Node):
    """With a sandbox `s` that is meant where none is named."""

    async def create(self, name: str = "s", **more: Any) -> SandboxRef:
        return await super().create(name, **more)

    async def run(
        self, command: str, *, sandbox: str = "s", timeout_s: float = 20.0, limit: int = 16384, exec_id: str = ""
    ) -> ExecResult:
        exec_id = exec_id or f"e{uuid.uuid4().hex[:12]}"
        return await self.manager.exec(
            ExecRequest(sandbox=sandbox, exec_id=exec_id, command=command, timeout_s=timeout_s, output_limit=limit)
        )

    async def verify(self, *commands: str, mode: str) -> VerifyResult:
        return await self.manager.verify(checks("v", "s", mode, *commands))
