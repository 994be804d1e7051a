"""What of a folder or a file goes from the agent's sandbox into that of a verifier. Works on archives in files.

The agent made what is carried, so only what stays within its folder goes: links that lead out of it, absolute ones too,
are left behind, and so is what the task excludes.
"""

import fnmatch
import posixpath
import tarfile
from collections.abc import Sequence
from pathlib import Path

from opengyre.tasks.errors import TaskError


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """As tar's ``--exclude``: a pattern fits a member, or a folder that it is in, from the root or from any folder."""
    parts = name.strip("/").split("/")
    return any(
        fnmatch.fnmatchcase("/".join(parts[begin:end]), pattern.removeprefix("./").strip("/"))
        for pattern in patterns
        for end in range(1, len(parts) + 1)
        for begin in (range(1) if pattern.startswith("/") else range(end))
    )


def of_folder(source: Path, target: Path, exclude: Sequence[str]) -> int:
    """A plain archive of a folder without what may not go; how many members are left behind. Blocks; raises `TaskError`
    for one that cannot be read."""
    left = 0
    gone: set[str] = set()
    try:
        with tarfile.open(source, mode="r|") as reading, tarfile.open(target, mode="w") as writing:
            for member in reading:
                name = posixpath.normpath(member.name)
                data = reading.extractfile(member) if member.isreg() else None
                if name != "." and (excluded(name, exclude) or not _within(name, member, gone)):
                    gone.add(name)
                    left += 1
                    continue
                writing.addfile(member, data)
    except (tarfile.TarError, ValueError, OSError) as error:
        raise TaskError(f"what the agent left cannot be read: {error}") from error
    return left


def _within(name: str, member: tarfile.TarInfo, gone: set[str]) -> bool:
    if name.startswith(("/", "../")) or name == "..":
        return False
    if member.issym():
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        return not (posixpath.isabs(member.linkname) or target == ".." or target.startswith("../"))
    if member.islnk():
        return posixpath.normpath(member.linkname) not in gone
    return member.isreg() or member.isdir()


def of_file(source: Path, target: Path, name: str, *, executable: bool) -> None:
    """A plain archive of one file. Blocks."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = source.stat().st_size, 0o755 if executable else 0o644
    with source.open("rb") as reading, tarfile.open(target, mode="w") as writing:
        writing.addfile(info, reading)
