"""End every sandbox that a stopped service of this machine left: they outlive it by design, so that it finds them."""

from pathlib import Path

from opengyre.sandbox.bubblewrap import Bubblewrap
from opengyre.sandbox.core import CannotIsolateError


async def clear(state_dir: Path) -> list[str]:
    """Remove all sandboxes below `state_dir` with their processes; return their ids.

    Raises `InfraError` where a service still uses the folder.
    """
    ended: list[str] = []
    places = state_dir / "sandbox"
    for root in sorted(places.iterdir()) if places.is_dir() else []:
        if not _holds(root):
            continue
        backend = Bubblewrap(root)
        try:
            live = await backend.start()
        except CannotIsolateError:  # its sandboxes are plain processes then
            await backend.stop()
            backend = Bubblewrap(root, isolated=False)
            live = await backend.start()
        try:
            for name in live:
                await backend.destroy(name)
                ended.append(name)
        finally:
            await backend.stop()
    return ended


def _holds(root: Path) -> bool:
    folder = root / "sandboxes"
    return folder.is_dir() and any(folder.iterdir())
