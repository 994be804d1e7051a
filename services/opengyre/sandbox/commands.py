"""From a command to the launcher's request, and from its monitor's record to the answer. Pure."""

import hashlib
import posixpath
from typing import Any, Literal

import msgspec

from opengyre.proto.sandbox import ExecResult
from opengyre.proto.sandbox_jobs import LogPage
from opengyre.sandbox import allowlist, jail
from opengyre.sandbox.core import PLAIN, Options, Spec
from opengyre.sandbox.records import Answer, Processes

SPOOL_MB = 64
"""Most of the full outputs of commands that is kept of a sandbox, in MiB; at least one command's."""


def keep_limit(spool_limit: int, spool_mb: int) -> int:
    """The same in bytes, where one stream of a command has at most ``spool_limit``."""
    return max(spool_mb << 20, 2 * spool_limit)


def digest(command: str, options: Options = PLAIN) -> str:
    """What an exec id stands for."""
    found = hashlib.sha256(command.encode("utf-8", "surrogateescape"))
    if options != PLAIN:
        found.update(b"\0" + msgspec.json.encode(options, order="deterministic"))
    return found.hexdigest()


def request(
    spec: Spec,
    record: Processes,
    *,
    marker: str,
    exec_id: str,
    cwd: str,
    uid: int | None,
    memory_by_cgroup: bool,
    spool_mb: int = SPOOL_MB,
    options: Options = PLAIN,
) -> dict[str, Any]:
    """What `opengyre.sandbox.launch.execs.Start` reads, but for the command, its bounds and its folder."""
    exec_marker = f"{marker}.{exec_id}"
    user = options.user or spec.user or record.user
    env = {**record.env, **allowlist.variables(spec.network), **spec.env, **options.env}
    return {
        "sandbox": spec.sandbox,
        "spool_limit": jail.spool_limit(spec),
        "keep_limit": keep_limit(jail.spool_limit(spec), spool_mb),
        "env": jail.environment(env, marker, exec_marker, None if user else cwd),
        "user": user,
        "keep": jail.ROOT_CAPABILITIES,
        "no_output_s": options.no_output_timeout_s,
        "pid": record.pid,
        "started": record.started,
        "uid": uid,
        "cwd": cwd if options.cwd is None else posixpath.normpath(posixpath.join(cwd, options.cwd)),
        "limits": jail.limits(spec, memory_by_cgroup=memory_by_cgroup),
        "marker": exec_marker,
        "isolated": record.isolated,
    }


def shortened(answer: Answer | ExecResult, stream: Literal["stdout", "stderr"], offset: int, limit: int) -> LogPage:
    """A page of what a command's answer holds of a stream, where the file is not kept."""
    data = (answer.stdout if stream == "stdout" else answer.stderr).encode("utf-8", "replace")
    written = answer.stdout_bytes if stream == "stdout" else answer.stderr_bytes
    cut = answer.stdout_truncated if stream == "stdout" else answer.stderr_truncated
    at = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
    page = data[at : at + limit]
    return LogPage(
        data=page,
        offset=at,
        next_offset=at + len(page),
        total=len(data),
        running=False,
        complete=not cut,
        written=written if cut else None,
    )


def result(exec_id: str, answer: Answer, *, isolated: bool) -> ExecResult:
    """The answer to the caller of a command that was run."""
    return ExecResult(
        exec_id=exec_id,
        exit_code=answer.exit_code,
        stdout=answer.stdout,
        stderr=answer.stderr,
        stdout_bytes=answer.stdout_bytes,
        stderr_bytes=answer.stderr_bytes,
        stdout_truncated=answer.stdout_truncated,
        stderr_truncated=answer.stderr_truncated,
        timed_out=answer.killed_by == "timeout",
        killed_by=answer.killed_by,
        duration_s=answer.duration_s,
        isolated=isolated,
        oom=answer.oom,
    )
