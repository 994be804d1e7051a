"""Background commands of a sandbox: requests and answers of the verbs ``spawn``, ``poll``, ``logs`` and ``kill``.

A background command is an ``exec`` that nobody waits for: both share their ids, records and bounds, so that ``logs``
and ``kill`` hold for either. It outlives a crash of the service, which finds it, its output and its exit code again.
"""

from collections.abc import Mapping
from typing import Literal

from opengyre.proto.base import Record
from opengyre.proto.sandbox import ExecResult


class SpawnRequest(Record, frozen=True, kw_only=True):
    """Start a command and do not wait for it (verb ``spawn``, answered by `JobStatus`). Fields as in `ExecRequest`."""

    sandbox: str
    """The sandbox's id."""
    exec_id: str
    """Id given by the caller, shared with ``exec``; the command runs once for it."""
    command: str
    """Shell text, of any length up to 4 MiB."""
    timeout_s: float = 3600.0
    """The command and all that it started are killed after this long."""
    output_limit: int = 16384
    """Most bytes of each stream in the answer of ``poll``; ``logs`` has it all."""
    cwd: str | None = None
    """Where it starts; None is the sandbox's working folder."""
    env: Mapping[str, str] = {}
    """Beside the sandbox's own; wins over it."""
    user: str | None = None
    """Who runs it; None is the sandbox's user."""
    stdin: bytes | None = None
    """Its standard input, at most 4 MiB; None is /dev/null."""
    no_output_timeout_s: float | None = None
    """It is killed as well after this long without a byte of output; None does not look at that."""


class PollRequest(Record, frozen=True, kw_only=True):
    """Look at a command (verb ``poll``, answered by `JobStatus`)."""

    sandbox: str
    """The sandbox's id."""
    exec_id: str
    """The command's id."""
    wait_s: float = 0.0
    """Wait this long for its end, at most 60."""


class JobStatus(Record, frozen=True, kw_only=True):
    """Where a command is."""

    exec_id: str
    """The command's id."""
    running: bool
    """It has not ended; then there is no result."""
    result: ExecResult | None = None
    """What it did."""


class LogsRequest(Record, frozen=True, kw_only=True):
    """Read a page of a command's output, while it runs or after (verb ``logs``, answered by `LogPage`)."""

    sandbox: str
    """The sandbox's id."""
    exec_id: str
    """The command's id."""
    stream: Literal["stdout", "stderr"] = "stdout"
    """Which of its streams."""
    offset: int = 0
    """Byte to begin at; negative counts from the end."""
    limit: int = 65536
    """Most bytes, at most 1 MiB."""


class LogPage(Record, frozen=True, kw_only=True):
    """A piece of a stream."""

    data: bytes
    """Its bytes (base64 in JSON)."""
    offset: int
    """Where it begins."""
    next_offset: int
    """Where the next page begins."""
    total: int
    """Bytes that there are by now."""
    running: bool
    """More may come."""
    complete: bool = True
    """False where the full text is not kept any more and this is of the shortened one."""
    written: int | None = None
    """Then the bytes that the command wrote."""


class KillRequest(Record, frozen=True, kw_only=True):
    """End a command (verb ``kill``, answered by `JobStatus`)."""

    sandbox: str
    """The sandbox's id."""
    exec_id: str
    """The command's id."""
    signal: Literal["KILL", "TERM", "INT"] = "KILL"
    """``KILL`` ends it with all that it started and waits for that; the others are sent to its process group."""
