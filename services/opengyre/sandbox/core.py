"""What a sandbox provider offers, whichever it is, and the errors that its callers tell apart.

"Timed out" and "gone" never look like an ordinary observation: a command's own timeout is a field of its result, and
everything that is not the command's doing is one of the errors below.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from opengyre.proto.sandbox import ErrorKind, ExecResult


class SandboxError(Exception):
    """One sentence that names the thing and what is allowed."""

    kind: ErrorKind = "infra_error"


class SandboxGone(SandboxError):
    """It never was, was destroyed, or its lease ran out."""

    kind = "sandbox_gone"


class SandboxBusy(SandboxError):
    """What was asked for cannot be done beside what runs now."""

    kind = "sandbox_busy"


class ExecTimeout(SandboxError):
    """The provider did not answer in its bound; the outcome is not known."""

    kind = "exec_timeout"


class OutputLimit(SandboxError):
    """A file is larger than the caller allowed."""

    kind = "output_limit"


class InfraError(SandboxError):
    """The machine failed, not the command."""

    kind = "infra_error"


class CannotIsolateError(InfraError):
    """This machine allows no sandbox; the sentence says why."""


class InvalidRequest(SandboxError):
    """A field has a value that is not allowed."""

    kind = "invalid_request"


ERRORS: dict[str, type[SandboxError]] = {
    error.kind: error for error in (SandboxGone, SandboxBusy, ExecTimeout, OutputLimit, InfraError, InvalidRequest)
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A checked `SandboxSpec` with the node's defaults filled in; what a backend makes, without the first files."""

    sandbox: str
    env: Mapping[str, str] = {}
    workspace_mb: int = 16
    memory_mb: int = 256
    pids: int = 64


class Backend(Protocol):
    """A provider. All methods may be repeated; ids are checked before they come here."""

    @property
    def isolated(self) -> bool:
        """Whether its sandboxes have namespaces of their own."""
        ...

    def unenforced(self) -> list[str]:
        """Sentences: what a spec asks for and this machine cannot hold."""
        ...

    async def start(self) -> list[str]:
        """Make ready; the ids of the live sandboxes that were found. Half-made and dead ones are removed."""
        ...

    async def stop(self) -> None:
        """Let go of everything; live sandboxes and running commands go on."""
        ...

    async def create(self, spec: Spec, files: Mapping[str, str]) -> None:
        """Make a sandbox with its first files, by absolute path.

        After a failure or a cancellation the caller calls `destroy`.
        """
        ...

    async def alive(self, sandbox: str) -> bool:
        """Whether it is there and can run commands."""
        ...

    async def exec(self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int) -> ExecResult:
        """Run a command once for its id, or join it, or answer what it did."""
        ...

    async def quiet(self, sandbox: str) -> None:
        """End every process in it except what holds it."""
        ...

    async def copy(self, source: str, target: Spec) -> None:
        """Copy the workspace of one sandbox, whatever runs in it, into the empty one of another, which holds as much.

        Raises `InvalidRequest` where this provider cannot keep the two apart.
        """
        ...

    async def read(self, sandbox: str, path: str, limit: int) -> bytes:
        """Content of a regular file."""
        ...

    async def write(self, sandbox: str, path: str, data: bytes, mode: int) -> None:
        """Write a regular file."""
        ...

    async def listen(self, sandbox: str, port: int) -> socket.socket:
        """A socket that listens on the sandbox's loopback; the caller closes it."""
        ...

    def folder(self, sandbox: str) -> Path:
        """Where the manager may keep records about it; it goes with the sandbox."""
        ...

    def execs(self, sandbox: str) -> tuple[int, list[str]]:
        """Number of recorded commands, and ids of those that run."""
        ...

    async def destroy(self, sandbox: str) -> None:
        """Leave nothing of it: processes, cgroups, folders. Waits for no command."""
        ...
