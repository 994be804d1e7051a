"""The machine on which `gyre task check` makes tasks: a backend of its own, which leaves nothing.

What a check that was killed has left, the next one removes: each holds a lock in its folder for as long as it lives.

Awaits: one sandbox at a time, each step bounded by the task's own timeouts.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from opengyre.cli.task_check_run import Facts, judged, run_task
from opengyre.cli.task_files import is_directory_of_others as is_task
from opengyre.sandbox import offline, stand_in
from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.clear import clear
from opengyre.sandbox.core import Backend, CannotIsolateError, InvalidRequest, SandboxError
from opengyre.sandbox.environments import Environments
from opengyre.sandbox.harbor import OFFLINE
from opengyre.sandbox.origin import HOST, named
from opengyre.sandbox.service import docker_backend
from opengyre.shared.settings import SandboxSettings
from opengyre.tasks.convert import spec_of
from opengyre.tasks.directory import TaskDirectory, read_task
from opengyre.tasks.errors import TaskError

log = logging.getLogger("gyre.cli")

PREFIX = "gyre-check-"
LOCK = "lock"


def found(paths: list[Path]) -> list[TaskDirectory]:
    """The tasks at paths, or in the folders right below them; raises `TaskError`."""
    tasks = []
    for path in paths:
        below = sorted(child for child in path.iterdir() if is_task(child)) if path.is_dir() else []
        tasks += [read_task(child) for child in ([path] if is_task(path) or not below else below)]
    return tasks


async def check_all(
    tasks: list[TaskDirectory], settings: SandboxSettings, state_dir: Path, tell: Callable[[str], None]
) -> list[Facts]:
    """What is known of each after its check; ``tell`` hears the name of each before. Raises `SandboxError`.

    ``state_dir``: of a stack, whose node's images may be named.
    """
    facts = []
    async with node(settings, state_dir) as environments:
        for task in tasks:
            tell(task.name)
            nothing, sentence = await run_task(task, environments, os.environ, solve=False)
            solved = None
            if nothing.error is None and all(step.solution for step in task.steps):
                solved, sentence = await run_task(task, environments, os.environ, solve=True)
            facts.append(judged(task, sentence, nothing, solved, _refused(task)))
    return facts


def _refused(task: TaskDirectory) -> str | None:
    """Why `gyre task submit` would not take it."""
    try:
        spec_of(task, os.environ)
    except TaskError as error:
        return str(error)
    return None


@contextlib.asynccontextmanager
async def node(settings: SandboxSettings, state_dir: Path) -> AsyncIterator[Environments]:
    """A backend of this command's own, with its environments; it leaves nothing."""
    for left in _abandoned():
        try:
            await clear(left, settings)
        except SandboxError as error:  # its engine is away, say: no reason against this check
            log.warning("what a check that was killed left in %s stays: %s", left, error)
        else:
            shutil.rmtree(left, ignore_errors=True)
    folder, held = _folder()
    try:
        binds: Mapping[str, str] = settings.bound()
        if settings.offline:
            tools, _ = await asyncio.to_thread(offline.make, offline.place(folder))
            binds = {**binds, OFFLINE: str(tools)}
        backend = _backend(folder, settings, binds, state_dir)
        # A start that fails half-way has to be taken back as well.
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(backend.stop)
            await backend.start()
            if isinstance(backend, Bubblewrap) and settings.stand_in == HOST:
                await asyncio.to_thread(stand_in.ensure, backend.image_cache)
            _known(settings, backend)
            environments = Environments(backend, "this machine", stand_in=settings.stand_in, offline=settings.offline)
            stack.push_async_callback(environments.forget)
            yield environments
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _known(settings: SandboxSettings, backend: Backend) -> None:
    """Raises `InvalidRequest` where the image that is to stand in for others is not here."""
    images = backend.images()
    if settings.stand_in is None or named(settings.stand_in, images) is not None:
        return
    allowed = [*images, *((HOST,) if isinstance(backend, Bubblewrap) else ())]
    raise InvalidRequest(
        f"--stand-in (or sandbox.stand_in) is {settings.stand_in!r}, which is no image of this machine; allowed: "
        f"{', '.join(allowed[:20]) or 'none yet'}"
    )


def _folder() -> tuple[Path, int]:
    """A folder that is locked before another check can find it; and the lock."""
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    held = os.open(made / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name[1:])), held


def _abandoned() -> Iterator[Path]:
    """Folders of checks that have died; each is locked until the next is asked for."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):  # ends, lives, is another's
            held = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(held)


def _backend(folder: Path, settings: SandboxSettings, binds: Mapping[str, str], state_dir: Path) -> Backend:
    # As a service's state directory has them, so that `clear` finds them.
    root = folder / ("sandbox-docker" if settings.backend == "docker" else "sandbox") / "node"
    if settings.backend == "docker":
        bound = tuple(f"{inside}={outside}" for inside, outside in binds.items())
        return docker_backend(root, settings.model_copy(update={"binds": bound}))
    if os.geteuid() != 0:
        raise CannotIsolateError(
            "tasks with an environment need images, which bubblewrap mounts as root only; run as root, or with docker"
        )
    images = state_dir / "sandbox" / settings.node / "images"
    return Bubblewrap(root, binds=binds, image_cache_mb=settings.image_cache_mb, images_beside=images)
