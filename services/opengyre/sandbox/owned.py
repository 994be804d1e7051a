"""The folder of a node's sandboxes: one service at a time owns it, for as long as its process lives.

Awaits: the end of the one that owns it, for `LOCK_BOUND_S`; one that is stopping lets go soon.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from opengyre.sandbox.core import InfraError

LOCK_BOUND_S = 10.0


async def own(root: Path, folders: Iterable[str]) -> int:
    """The lock on a folder, made with those in it where they are not there; closing it lets go. Raises `InfraError`."""
    lock = await asyncio.to_thread(_opened, root, folders)
    try:
        async with asyncio.timeout(LOCK_BOUND_S):
            while not _locked(lock):  # noqa: ASYNC110 - state of the system, which has no event
                await asyncio.sleep(0.1)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, TimeoutError):
            raise InfraError(f"another sandbox service uses {root}; give each a folder of its own") from None
        raise
    return lock


def _opened(root: Path, folders: Iterable[str]) -> int:
    for name in folders:
        (root / name).mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    return os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
