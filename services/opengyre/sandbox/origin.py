"""What a task's environment is made from on this node: an image of it, or the node's own system folders as a stand-in,
and the steps of its Dockerfile. Pure.

A base that is not here is refused, unless the node's own may stand in for it; then the answer says so.
"""

from collections.abc import Collection

import msgspec

from opengyre.proto.sandbox import Capabilities
from opengyre.proto.task import TaskEnvironment
from opengyre.sandbox.check import hosts
from opengyre.sandbox.core import InvalidRequest, Spec, unsupported
from opengyre.tasks.dockerfile import Plan, read_dockerfile
from opengyre.tasks.errors import TaskError

HOST = "host"
"""Name of the image that is the node's own system folders."""
PIDS = 512
"""Processes that a task's environment may have at least: tests start more than an agent's commands."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where an environment comes from."""

    image: str
    plan: Plan
    sentence: str
    """For people: the base, and how much of the Dockerfile was replayed."""


def origin(environment: TaskEnvironment, images: Collection[str], *, stand_in: str | None, node: str) -> Origin:
    """Raises `InvalidRequest` where this node cannot make the environment. ``stand_in``: the image that takes the place
    of a base that is not here.
    """
    if environment.dockerfile is None:
        plan = Plan(base=environment.image or "", workdir="")
    else:
        try:
            plan = read_dockerfile(environment.dockerfile)
        except TaskError as error:
            raise InvalidRequest(f"environment.dockerfile: {error}") from error
    if plan.refused:
        more = f" (and {len(plan.refused) - 1} more)" if len(plan.refused) > 1 else ""
        raise InvalidRequest(
            f"environment.dockerfile cannot be replayed: {next(iter(plan.refused))}{more}; build it with Docker"
        )
    here = named(plan.base, images)
    instead = named(stand_in, images) if stand_in is not None else None
    if here is None and instead is None:
        allowed = ", ".join(sorted(images)[:10]) or "none yet"
        other = f", and not {stand_in!r}" if stand_in is not None else ""
        raise InvalidRequest(
            f"environment wants the base {plan.base!r}, which is not on {node}; allowed are its images ({allowed}), or "
            f"any base where the setting sandbox.stand_in names one of these{other} to take its place"
        )
    if here is not None:
        base = f"image {here}"
    else:
        base = f"{'host root' if instead == HOST else f'image {instead}'} in place of {plan.base}"
    return Origin(image=here or instead or HOST, plan=plan, sentence=base + _replayed(plan))


def named(base: str, images: Collection[str]) -> str | None:
    """The image of that name, with or without what a name leaves out."""
    plain = base.partition("@")[0].removeprefix("docker.io/").removeprefix("library/")
    full = plain if ":" in plain.rpartition("/")[2] else f"{plain}:latest"
    for name in (base, plain, full):
        if name in images:
            return name
    return None


def _replayed(plan: Plan) -> str:
    if not plan.instructions:
        return ""
    passed = f" ({', '.join(plan.passed_over)} passed over)" if plan.passed_over else ""
    count = plan.instructions - len(plan.passed_over)
    return f", replayed {count} of {plan.instructions} instructions{passed}"


def specified(spec: Spec, environment: TaskEnvironment, made: Origin, can: Capabilities) -> Spec:
    """The sandbox of an environment: what the task asks for, where this node can hold it."""
    root = "root" if can.users else None
    if environment.network == "allowlist":
        hosts(environment.allowed_hosts)
        if not can.network_allowlist:
            raise unsupported("network_allowlist", "environment.network 'allowlist'", can.backend)
        spec = msgspec.structs.replace(spec, network="allowlist", allowed_hosts=environment.allowed_hosts)
    return msgspec.structs.replace(
        spec,
        image=made.image,
        env={**made.plan.env, **environment.env, **spec.env},
        workdir=environment.workdir or made.plan.workdir or None,
        user=(environment.user or made.plan.user or root) if can.users else None,
        memory_mb=environment.memory_mb or spec.memory_mb,
        pids=max(spec.pids, PIDS),
        cpus=environment.cpus if can.cpu_limit else None,
        disk_mb=environment.storage_mb if can.disk_limit else None,
    )
