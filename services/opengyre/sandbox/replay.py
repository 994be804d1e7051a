"""Doing the steps of a Dockerfile in a fresh sandbox of its base.

Awaits: one step at a time, each bounded by the environment's build timeout.
"""

import shlex

from opengyre.proto.task import TaskEnvironment
from opengyre.sandbox.core import InvalidRequest, Options
from opengyre.sandbox.harbor import Inside
from opengyre.sandbox.verdict import interrupted
from opengyre.tasks import ignoring
from opengyre.tasks.archives import contents, unsqueeze, without
from opengyre.tasks.copying import copied
from opengyre.tasks.dockerfile import Copy, Folder, Plan, Run
from opengyre.tasks.errors import TaskError

TAIL = 600


async def replay(environment: TaskEnvironment, plan: Plan, inside: Inside) -> None:
    """Raises `InvalidRequest` with the line and the words of the instruction that failed, or as the backend does."""
    try:
        context = _context(environment.context)
        for number, step in enumerate(plan.steps):
            match step:
                case Folder():
                    await inside.must(f"{number}", f"mkdir -p -- {shlex.quote(step.path)}", inside.root)
                case Copy():
                    await _copy(f"{number}", context, step, inside)
                case Run():
                    await _run(f"{number}", step, environment.build_timeout_s, inside)
    except TaskError as error:
        raise InvalidRequest(f"environment: {error}") from error
    workdir = environment.workdir or plan.workdir
    if workdir not in ("", "/"):
        await inside.must("workdir", f"mkdir -p -- {shlex.quote(workdir)}", inside.root)


def _context(packed: bytes) -> bytes:
    """The build context as a plain archive, without what its own file leaves out."""
    if not packed:
        return b""
    context = unsqueeze(packed)
    there = contents(context)
    name = next((name for name in ignoring.NAMES if name in there), None)
    if name is None:
        return context
    return without(context, ignoring.rules(there[name].decode("utf-8", "replace"), name))


async def _copy(name: str, context: bytes, step: Copy, inside: Inside) -> None:
    folder, archive, paths = copied(context, step)
    await inside.put(folder, archive, inside.root)
    quoted = " ".join(shlex.quote(path) for path in paths)
    if step.owner is not None:
        await inside.must(f"{name}o", f"chown -R -- {shlex.quote(step.owner)} {quoted}", inside.root)
    if step.mode is not None:
        await inside.must(f"{name}m", f"chmod -R -- {shlex.quote(step.mode)} {quoted}", inside.root)


async def _run(name: str, step: Run, timeout_s: float, inside: Inside) -> None:
    shell = " ".join(shlex.quote(word) for word in step.shell)
    user = (step.user or inside.root) if inside.root is not None else None
    options = Options(cwd=step.workdir, user=user, env=inside.environment(step.env))
    done = await inside.run(name, f"exec {shell} {shlex.quote(step.command)}", timeout_s, options)
    if done.exit_code != 0:
        why = interrupted("it", done) or f"exit status {done.exit_code}"
        tail = (done.stdout + done.stderr).strip()[-TAIL:]
        raise InvalidRequest(
            f"environment: Dockerfile line {step.line} (RUN {step.command[:80]!r}) failed, {why}: {tail}"
        )
