"""End every sandbox that a stopped service of this machine left, and its snapshots: they outlive it by design, so that
it finds them.
"""

from collections.abc import Iterator
from pathlib import Path

from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import Backend, CannotIsolateError
from opengyre.shared.settings import SandboxSettings, load


async def clear(state_dir: Path, settings: SandboxSettings | None = None) -> list[str]:
    """Remove all sandboxes below `state_dir` with their processes; return their ids.

    ``settings`` tell where the engine of containers is; those of the environment by default. Raises `InfraError` where
    a service still uses the folder or the engine does not answer.
    """
    ended: list[str] = []
    for root in _roots(state_dir / "sandbox"):
        try:
            ended += await _end_all(Bubblewrap(root))
        except CannotIsolateError:  # its sandboxes are plain processes then
            ended += await _end_all(Bubblewrap(root, isolated=False))
    for root in _roots(state_dir / "sandbox-docker"):
        # Only here: a machine without containers has no client of an engine either.
        from opengyre.sandbox.service import docker_backend

        ended += await _end_all(docker_backend(root, settings or load().sandbox))
    return ended


def _roots(place: Path) -> Iterator[Path]:
    for root in sorted(place.iterdir()) if place.is_dir() else []:
        if any(_holds(root / kind) for kind in ("sandboxes", "snapshots")):
            yield root


def _holds(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


async def _end_all(backend: Backend) -> list[str]:
    try:
        live = await backend.start()
        for name in live:
            await backend.destroy(name)
        for snapshot in backend.snapshots():
            await backend.drop(snapshot)
    finally:
        await backend.stop()
    return live
