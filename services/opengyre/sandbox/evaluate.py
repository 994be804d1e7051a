"""Evaluations: the checks one after another, wherever they run, and the names of clean sandboxes made for them.

Awaits: `evaluate` waits for one check at a time, each bounded by its timeout.
"""

import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from opengyre.proto.sandbox import ExecResult, VerifyRequest, VerifyResult
from opengyre.sandbox.core import ExecTimeout, InfraError, Spec
from opengyre.sandbox.verdict import judge, verdict

CHECK_OUTPUT = 4096
MARGIN_S = 120.0
"""What making, filling and removing a clean sandbox may take beside its checks; after that its lease ends it."""
HOME = "/tmp"  # noqa: S108 - the sandbox's own

Execute = Callable[[str, str, float, int], Awaitable[ExecResult]]
"""Run a command: its id, its text, its timeout in seconds, most bytes of its output."""


def clean(spec: Spec, verify_id: str) -> Spec:
    """The sandbox for one evaluation of another one. A dot is in no caller's id, so this name is nobody's.

    Its home is not the workspace: what is copied there shall configure no tool of the checks.
    """
    name = f"{spec.sandbox}.{verify_id}"
    if spec.image is not None:  # it is a copy of all of the root, whose homes are as the task's environment has them
        return msgspec.structs.replace(spec, sandbox=name)
    return msgspec.structs.replace(spec, sandbox=name, env={**spec.env, "HOME": HOME})


def own_name(spec: Spec, verify_id: str) -> str:
    """The sandbox of a verifier's own environment for one evaluation, beside that of `clean`."""
    return f"{spec.sandbox}.{verify_id}.own"


def is_clean(name: str) -> bool:
    """Whether that is the name of a sandbox made for an evaluation."""
    return "." in name


def is_of(name: str, sandbox: str) -> bool:
    """Whether that sandbox was made for an evaluation of ``sandbox``."""
    return name.startswith(f"{sandbox}.")


def lasts_s(request: VerifyRequest) -> float:
    """Longest life of a clean sandbox."""
    if request.tests is not None:
        return request.tests.longest_s + MARGIN_S
    return len(request.checks) * request.timeout_s + MARGIN_S


def snapshot_for(name: str) -> str:
    """Id of the snapshot that the clean sandbox ``name`` begins with; a dot is in no caller's."""
    return f"verify.{hashlib.sha256(name.encode()).hexdigest()[:32]}"


async def evaluate(request: VerifyRequest, execute: Execute, *, isolated: bool) -> VerifyResult:
    """Run the checks, up to the first that cannot be evaluated."""
    parts = []
    for number, part in enumerate(request.checks):
        # A dot is in no caller's id.
        exec_id = f"verify.{request.verify_id}.{number}"
        try:
            done = await execute(exec_id, part.command, request.timeout_s, CHECK_OUTPUT)
        except (InfraError, ExecTimeout) as error:
            return msgspec.structs.replace(
                verdict(request.verify_id, parts, len(request.checks), isolated=isolated),
                infra_error=f"check {part.name!r} could not be run: {error}",
            )
        parts.append(judge(part, done))
        if parts[-1].error is not None:
            break
    return verdict(request.verify_id, parts, len(request.checks), isolated=isolated)


def failed(request: VerifyRequest, why: str, *, isolated: bool) -> VerifyResult:
    """The answer where no check was run."""
    return msgspec.structs.replace(
        verdict(request.verify_id, [], len(request.checks), isolated=isolated), valid=False, infra_error=why
    )
