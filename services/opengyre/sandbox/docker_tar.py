"""Archives between a sandbox and the node: whoever made one, what comes out of here is plain and stays where it is put.

Regular files, folders, symbolic and hard links remain; devices, FIFOs and sockets are left out and counted. No name is
absolute, leads out by ``..``, or lies below a link. Nobody's names or ids are kept. Blocking: called in a thread.
"""

import io
import posixpath
import tarfile
import time
from pathlib import Path
from typing import BinaryIO

from opengyre.sandbox.core import InfraError, InvalidRequest, OutputLimit, Packed

MAX_ENTRIES = 500_000
MAX_NAME = 4000


def member_name(name: str) -> str | None:
    """A member's name below the top, ``""`` for the top itself; None where it would lie elsewhere. Pure."""
    if name.startswith("/") or "\0" in name or len(name) > MAX_NAME or ".." in name.split("/"):
        return None
    normal = posixpath.normpath(name) if name else "."
    return "" if normal == "." else normal


def below_link(name: str, links: set[str]) -> bool:
    """Whether a name goes through one of the links. Pure."""
    return any(name[:at] in links for at, letter in enumerate(name) if letter == "/")


class _Bounded:
    """Counts what an archive's content takes."""

    def __init__(self, limit: int, what: str) -> None:
        self.left = limit
        self._limit = limit
        self._what = what

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise OutputLimit(f"{self._what} holds more than the limit of {self._limit} bytes")


def filtered(source: BinaryIO, target: BinaryIO, *, limit: int, what: str, strict: bool) -> Packed:
    """Copy an archive as above. ``limit``: most bytes of content. ``strict``: a name that leads out is an
    `InvalidRequest`, else it is left out. Whoever unpacks it owns it. `InvalidRequest` where it is none.
    """
    room = _Bounded(limit, what)
    links: set[str] = set()
    entries = skipped = 0
    try:
        with (
            tarfile.open(fileobj=source, mode="r|") as reading,
            tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as writing,
        ):
            for member in reading:
                name = member_name(member.name)
                if name == "" and member.isdir():
                    continue
                outside = not name or below_link(name, links) or not _link_stays(member)
                if outside and strict:
                    raise InvalidRequest(f"{what} has {member.name[:200]!r}; allowed are names that stay in its folder")
                if not name or outside or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    skipped += 1
                    continue
                entries += 1
                if entries > MAX_ENTRIES:
                    raise OutputLimit(f"{what} has more than {MAX_ENTRIES} files; allowed are so many")
                room.take(member.size if member.isreg() else 0)
                if member.issym():
                    links.add(name)
                writing.addfile(_plain(member, name), reading.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise InvalidRequest(f"{what} is no tar archive: {error}") from error
    except OSError as error:
        raise InfraError(f"{what} could not be copied: {error}") from error
    return Packed(entries=entries, skipped=skipped)


def _link_stays(member: tarfile.TarInfo) -> bool:
    """Whether a hard link is to another member. A symbolic link is only text, and nothing is put through it."""
    return not member.islnk() or bool(member_name(member.linkname))


def _plain(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = tarfile.REGTYPE if member.isreg() else member.type
    made.size = member.size if member.isreg() else 0
    made.mode = member.mode & 0o777
    made.mtime = int(member.mtime)
    made.linkname = posixpath.normpath(member.linkname) if member.islnk() else member.linkname
    return made


def filter_file(source: Path, target: Path, *, limit: int, what: str, strict: bool) -> Packed:
    """`filtered` from file to file; after a failure there is no target."""
    try:
        with source.open("rb") as reading, target.open("wb") as writing:
            return filtered(reading, writing, limit=limit, what=what, strict=strict)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def of_files(files: dict[str, bytes], target: Path) -> None:
    """An archive of regular files, by path below the top."""
    now = int(time.time())  # a date to show, not a duration
    with target.open("wb") as writing, tarfile.open(fileobj=writing, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o644
            member.mtime = now
            archive.addfile(member, io.BytesIO(data))


def size_of(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
