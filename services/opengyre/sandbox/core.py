"""What a sandbox provider offers, whichever it is, and the errors that its callers tell apart.

"Timed out" and "gone" never look like an ordinary observation: a command's own timeout is a field of its result, and
everything that is not the command's doing is one of the errors below.
"""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from opengyre.proto.sandbox import Capabilities, ErrorKind, ExecResult, NetworkUse
from opengyre.proto.sandbox_jobs import JobStatus, LogPage


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


def unsupported(capability: str, field: str, backend: str) -> InvalidRequest:
    """What is raised where a backend's `Capabilities` say no: refused, never imitated."""
    return InvalidRequest(f"{field} needs the capability {capability!r}, which {backend} has not on this node")


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
    image: str | None = None
    network: Literal["none", "allowlist"] = "none"
    allowed_hosts: tuple[str, ...] = ()
    cpus: float | None = None
    disk_mb: int | None = None
    workdir: str | None = None
    user: str | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a command runs, beside its text and its bounds; see `opengyre.proto.sandbox.ExecRequest`."""

    cwd: str | None = None
    env: Mapping[str, str] = {}
    user: str | None = None
    stdin: bytes | None = None
    no_output_timeout_s: float | None = None


PLAIN = Options()


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What went through an archive."""

    entries: int
    skipped: int


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An image that is there; see `opengyre.proto.sandbox_images.ImageInfo`."""

    name: str
    size: int
    used_at: float | None
    in_use: bool


class Backend(Protocol):
    """A provider. All methods may be repeated; ids are checked before they come here."""

    @property
    def isolated(self) -> bool:
        """Whether its sandboxes have namespaces of their own."""
        ...

    def capabilities(self) -> Capabilities:
        """What it can do here; known once it was started."""
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

    async def exec(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> ExecResult:
        """Run a command once for its id, or join it, or answer what it did."""
        ...

    async def spawn(
        self, spec: Spec, exec_id: str, command: str, timeout_s: float, limit: int, options: Options = PLAIN
    ) -> None:
        """Start a command once for its id; `exec` with the same text joins it, `poll` looks at it."""
        ...

    async def poll(self, sandbox: str, exec_id: str, wait_s: float = 0.0) -> JobStatus:
        """Whether a command runs and what it did; waits for its end for so long. Raises `InvalidRequest` where the id
        is none.
        """
        ...

    async def logs(
        self, sandbox: str, exec_id: str, stream: Literal["stdout", "stderr"], offset: int, limit: int
    ) -> LogPage:
        """Bytes of a command's output from ``offset`` (negative: from the end)."""
        ...

    async def kill(self, sandbox: str, exec_id: str, signal: Literal["KILL", "TERM", "INT"] = "KILL") -> None:
        """End a command; KILL with all that it started, and its end is waited for. Nothing where it has ended."""
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

    async def put(self, sandbox: str, path: str, archive: Path, user: str | None = None) -> Packed:
        """Unpack a tar archive, a file of the node, into a directory of the sandbox."""
        ...

    async def get(self, sandbox: str, path: str, archive: Path, limit: int) -> Packed:
        """Pack a directory into a tar archive of at most ``limit`` bytes, a file of the node."""
        ...

    async def read_to(self, sandbox: str, path: str, target: Path, limit: int) -> None:
        """Content of a regular file of any size up to ``limit``, into a file of the node."""
        ...

    async def write_from(self, sandbox: str, path: str, source: Path, mode: int) -> None:
        """Write a regular file from a file of the node."""
        ...

    async def snapshot(self, spec: Spec, snapshot: str) -> int:
        """Keep the files of a sandbox under a new id, once; bytes that it takes."""
        ...

    async def fork(self, snapshot: str, spec: Spec) -> None:
        """Make a sandbox as `create` does, with the files of a snapshot."""
        ...

    async def restore(self, spec: Spec, snapshot: str) -> None:
        """End all that runs in a sandbox and give it the files of a snapshot."""
        ...

    async def drop(self, snapshot: str) -> bool:
        """Forget a snapshot; False where there is none."""
        ...

    def snapshots(self) -> list[str]:
        """Ids of the snapshots that are there, also those of before a restart."""
        ...

    def snapshot_folder(self, snapshot: str) -> Path:
        """Where the manager may keep records about a snapshot; it goes with it."""
        ...

    def images(self) -> list[str]:
        """Names that a spec's ``image`` may have."""
        ...

    async def image_list(self) -> tuple[list[Stored], int | None]:
        """Those images, by name, and the bytes that all may take together, None where that has no bound."""
        ...

    async def add_image(self, image: str, source: Path, told: Callable[[int], None]) -> Stored:
        """An image from an archive or a folder of the node, in the place of one of that name. ``told``, in a thread,
        the bytes of each file before it is written; what it raises ends the addition, which leaves nothing.
        """
        ...

    def image_source(self, path: str) -> Path:
        """Where on the node an image may be added from; raises `InvalidRequest` for other places."""
        ...

    async def remove_image(self, image: str) -> int:
        """Remove an image; the bytes that it took."""
        ...

    async def listen(self, sandbox: str, port: int) -> socket.socket:
        """A socket that listens on the sandbox's loopback; the caller closes it."""
        ...

    async def connect(self, spec: Spec) -> None:
        """Open the way out of a sandbox with an allow-list that was found by `start`, unless it is open."""
        ...

    def network(self, sandbox: str) -> NetworkUse | None:
        """What it did with its way out; None where that is not open."""
        ...

    def folder(self, sandbox: str) -> Path:
        """Where the manager may keep records about it; it goes with the sandbox."""
        ...

    async def trim(self) -> None:
        """Hold what the commands of each sandbox have written to its bound, the oldest first; asked now and then."""
        ...

    def execs(self, sandbox: str) -> tuple[int, list[str]]:
        """Number of recorded commands, and ids of those that run."""
        ...

    async def destroy(self, sandbox: str) -> None:
        """Leave nothing of it: processes, cgroups, folders. Waits for no command."""
        ...
