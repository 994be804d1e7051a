"""From a command to the launcher's request, and from its monitor's record to the answer. Pure."""

import hashlib
from typing import Any

from opengyre.proto.sandbox import ExecResult
from opengyre.sandbox import jail
from opengyre.sandbox.core import Spec
from opengyre.sandbox.records import Answer, Processes


def digest(command: str) -> str:
    """What an exec id stands for."""
    return hashlib.sha256(command.encode("utf-8", "surrogateescape")).hexdigest()


def request(
    spec: Spec,
    record: Processes,
    *,
    marker: str,
    exec_id: str,
    cwd: str,
    uid: int | None,
    memory_by_cgroup: bool,
) -> dict[str, Any]:
    """What `opengyre.sandbox.launch.execs.Start` reads, but for the command, its bounds and its folder."""
    exec_marker = f"{marker}.{exec_id}"
    return {
        "sandbox": spec.sandbox,
        "spool_limit": jail.spool_limit(spec),
        "env": jail.environment(spec, marker, exec_marker, cwd),
        "pid": record.pid,
        "started": record.started,
        "uid": uid,
        "cwd": cwd,
        "limits": jail.limits(spec, memory_by_cgroup=memory_by_cgroup),
        "marker": exec_marker,
        "isolated": record.isolated,
    }


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
    )
