"""A verifier in an environment of its own: what it is given of the agent's sandbox.

Invariants: nothing of the agent's but the artifacts is there; what the agent made cannot place files elsewhere than
where an artifact belongs; nothing is left on the node. An artifact that is not there is not carried: the tests see it.

Awaits: one archive at a time, each bounded by the backend.
"""

import asyncio
import posixpath
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from opengyre.proto.task import Artifact, TaskEnvironment
from opengyre.sandbox.core import InfraError, InvalidRequest, Options, OutputLimit, Spec
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.harbor import PATH, STEP_S, Inside
from opengyre.sandbox.origin import Origin
from opengyre.tasks import carrying
from opengyre.tasks.errors import TaskError

ALWAYS = Artifact(source="/logs/artifacts")
LIMIT = 1 << 30
"""Bytes of one artifact."""


def building_s(environment: TaskEnvironment, made: Origin) -> float:
    """The longest that an environment may take to be there."""
    waiting = environment.healthcheck.longest_s if environment.healthcheck is not None else 0.0
    return environment.build_timeout_s * len(made.plan.steps) + waiting


def own(environments: Environments, defaults: Spec, name: str, environment: TaskEnvironment) -> tuple[Spec, Origin]:
    """The fresh sandbox of a verifier; raises `InvalidRequest` where this node cannot make it."""
    return environments.specify(msgspec.structs.replace(defaults, sandbox=name), environment)


async def carry(artifacts: Sequence[Artifact], source: Inside, target: Inside) -> None:
    """Bring artifacts to the same paths; raises `InfraError` for one that is too large or cannot be read."""
    with tempfile.TemporaryDirectory(prefix="gyre-carry-") as folder:
        for number, artifact in enumerate(dict.fromkeys((ALWAYS, *artifacts))):
            await _carry(number, artifact, source, target, Path(folder))


async def _carry(number: int, artifact: Artifact, source: Inside, target: Inside, folder: Path) -> None:
    path = posixpath.normpath(artifact.source)
    raw, packed = folder / "raw", folder / "packed"
    name, place = source.spec.sandbox, path
    try:
        match await _kind(number, path, source):
            case "d":
                await source.backend.get(name, path, raw, LIMIT)
                await asyncio.to_thread(carrying.of_folder, raw, packed, artifact.exclude)
            case "f" | "x" as kind:
                await source.backend.read_to(name, path, raw, LIMIT)
                place = posixpath.dirname(path)
                await asyncio.to_thread(carrying.of_file, raw, packed, posixpath.basename(path), executable=kind == "x")
            case _:
                return
    except InvalidRequest:
        return  # it has gone meanwhile, or is nothing that can be carried: as one that is not there
    except (OutputLimit, TaskError) as error:
        raise InfraError(f"artifact {path!r} cannot be carried to the verifier: {error}") from error
    await target.backend.put(target.spec.sandbox, place, packed, target.root)


async def _kind(number: int, path: str, inside: Inside) -> str:
    """``d`` for a folder, ``f`` for a file, ``x`` for one that can be executed, nothing for what is neither."""
    there = shlex.quote(path)
    look = f"if [ -d {there} ]; then echo d; elif [ -x {there} ] && [ -f {there} ]; then echo x; "
    look += f"elif [ -f {there} ]; then echo f; fi"
    options = Options(cwd="/", user=inside.root, env={"PATH": PATH})
    return (await inside.run(f"artifact{number}", look, STEP_S, options)).stdout.strip()
