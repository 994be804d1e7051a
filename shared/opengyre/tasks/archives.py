"""Folders as tar archives that are the same for the same content: sorted, without times and owners.

Modes are kept as readable, or readable and executable; links that lead out of their folder are refused. Reads files.
"""

import gzip
import io
import os
import posixpath
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from opengyre.tasks import ignoring
from opengyre.tasks.errors import TaskError

MAX_BYTES = 64 << 20
MAX_ENTRIES = 20_000


def pack(entries: Iterable[tuple[str, Path]], most: int = MAX_BYTES, ignored: ignoring.Rules = ()) -> bytes:
    """A plain tar archive of files and folders under their names in it, those of an entry over those before it, without
    what is ``ignored``; raises `TaskError`."""
    found: dict[str, Path] = {}
    for name, path in entries:
        if path.is_dir() and not path.is_symlink():
            for below in _walk(path):
                found[
                    posixpath.join(name, below.relative_to(path).as_posix())
                    if name
                    else below.relative_to(path).as_posix()
                ] = below
        else:
            found[name] = path
    if len(found) > MAX_ENTRIES:
        raise TaskError(f"{len(found)} files are in one folder of a task; allowed are {MAX_ENTRIES}")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(ignoring.kept(found, ignored)):
            _add(archive, name, found[name])
            if stream.tell() > most:
                raise TaskError(f"{found[name].parent} holds more than {most} bytes; so much is allowed")
    return stream.getvalue()


def _walk(root: Path) -> Iterable[Path]:
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            yield Path(folder, name)


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    info = tarfile.TarInfo(name)
    if path.is_symlink():
        target = os.fspath(path.readlink())
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if posixpath.isabs(target) or place.startswith("../") or place == "..":
            raise TaskError(f"{path} is a link to {target}; allowed are links within their folder")
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        archive.addfile(info)
    elif path.is_dir():
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(info)
    elif path.is_file():
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TaskError(f"{path} cannot be read: {error.strerror}") from error
        info.size, info.mode = len(data), 0o755 if path.stat().st_mode & 0o111 else 0o644
        archive.addfile(info, io.BytesIO(data))
    else:
        raise TaskError(f"{path} is a special file; allowed are files, folders and links")


def squeeze(archive: bytes) -> bytes:
    """The archive compressed, the same for the same bytes."""
    return gzip.compress(archive, 6, mtime=0)


def unsqueeze(data: bytes, most: int = MAX_BYTES) -> bytes:
    """The archive of a compressed one, of at most so many bytes; raises `TaskError`."""
    stretch = zlib.decompressobj(wbits=31)
    try:
        found = stretch.decompress(data, most + 1)
    except zlib.error as error:
        raise TaskError(f"an archive of the task is damaged: {error}") from error
    if len(found) > most:
        raise TaskError(f"an archive of the task holds more than {most} bytes; so much is allowed")
    if not stretch.eof:
        raise TaskError("an archive of the task is damaged: it ends too soon")
    return found


def members(archive: bytes) -> list[tarfile.TarInfo]:
    """What is in a plain archive; raises `TaskError`."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            return opened.getmembers()
    except (tarfile.TarError, ValueError, OSError) as error:
        raise TaskError(f"an archive of the task cannot be read: {error}") from error


def chosen(archive: bytes, names: Iterable[tuple[str, str]]) -> bytes:
    """An archive of some members under other names: pairs of a member (with all below it) and its new name."""
    source = io.BytesIO(archive)
    stream = io.BytesIO()
    try:
        with tarfile.open(fileobj=source, mode="r:") as opened, tarfile.open(fileobj=stream, mode="w") as made:
            there = opened.getmembers()
            for name, new in names:
                for member in there:
                    below = _below(member.name, name)
                    if below is None:
                        continue
                    target = posixpath.normpath(posixpath.join(new, below)) if new or below else ""
                    if target in ("", "."):
                        continue
                    data = opened.extractfile(member) if member.isreg() else None
                    made.addfile(member.replace(name=target, deep=False), data)
    except (tarfile.TarError, ValueError, OSError, KeyError) as error:
        raise TaskError(f"an archive of the task cannot be read: {error}") from error
    return stream.getvalue()


def without(archive: bytes, ignored: ignoring.Rules) -> bytes:
    """A plain archive without what is ``ignored``; raises `TaskError`."""
    stays = ignoring.kept([member.name for member in members(archive)], ignored)
    stream = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened,
            tarfile.open(fileobj=stream, mode="w") as made,
        ):
            for name in stays:
                member = opened.getmember(name)
                made.addfile(member, opened.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, ValueError, OSError, KeyError) as error:
        raise TaskError(f"an archive of the task cannot be read: {error}") from error
    return stream.getvalue()


def _below(member: str, name: str) -> str | None:
    if name == ".":
        return member
    if member == name:
        return ""
    return member[len(name) + 1 :] if member.startswith(f"{name}/") else None


def contents(archive: bytes, most_each: int = 16 << 20) -> dict[str, bytes]:
    """The regular files at the top of a plain archive, by name, those that are not larger; raises `TaskError`."""
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for member in opened:
                name = member.name.removeprefix("./")
                data = opened.extractfile(member) if member.isreg() and "/" not in name else None
                if data is not None and member.size <= most_each:
                    found[name] = data.read()
    except (tarfile.TarError, ValueError, OSError) as error:
        raise TaskError(f"what the tests left cannot be read: {error}") from error
    return found
