"""Model directories for use outside of runs: made beside their place, summed, synced, and put there by one rename.

`SHA256SUMS` is in the form that `sha256sum -c` reads. Needs no torch.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opengyre.shared.durable import sync
from opengyre.weights.manifest import describe

SUMS_FILE: Final = "SHA256SUMS"


@contextlib.contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """A folder on the same file system, gone with all that is left in it at the end of the block. Raises `OSError`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sums(directory: Path) -> str:
    """Content of `SHA256SUMS` for the files that are there."""
    found = [describe(path) for path in sorted(directory.iterdir()) if path.is_file() and path.name != SUMS_FILE]
    return "".join(f"{file.sha256}  {file.name}\n" for file in found)


def damaged(directory: Path) -> list[str]:
    """Names of the files that are not what `SHA256SUMS` says; that one's own where it cannot be read."""
    try:
        lines = (directory / SUMS_FILE).read_text(encoding="utf-8").splitlines()
        wanted = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        return [SUMS_FILE]
    return [
        name
        for name, digest in wanted.items()
        if not (directory / name).is_file() or describe(directory / name).sha256 != digest
    ]


def place(made: Path, directory: Path) -> None:
    """Sum what was made and put it there, durably. Raises `OSError`, also where the directory is not empty."""
    (made / SUMS_FILE).write_text(sums(made), encoding="utf-8")
    for path in made.iterdir():
        path.chmod(0o644)  # the writer of safetensors makes files that only their owner may read
        sync(path)
    made.chmod(0o755)
    sync(made)
    made.rename(directory)
    sync(directory.parent)
