"""The root of an image out of a tar archive.

Invariants: nothing is written, linked or chowned outside of the folder that it is unpacked into, whatever the archive's
names and links say; modes and numbers of owners are the archive's; what is special (devices, FIFOs) is left out.

Blocks; call it in a thread.
"""

import gzip
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from opengyre.sandbox.core import InvalidRequest

ALLOWED = "allowed is a tar archive, plain or compressed by gzip, bzip2 or xz"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SHELL = ("sh", "sleep")
_PROGRAMS = ("bin", "usr/bin", "usr/local/bin", "sbin", "usr/sbin")


def unpack(name: str, archive: Path, rootfs: Path, step: Callable[[int], None]) -> None:
    """Fill ``rootfs``, an empty folder. ``step`` is told the bytes of each file before it is written, and may raise."""

    def filtered(member: tarfile.TarInfo, _: str) -> tarfile.TarInfo:
        return _checked(name, member, rootfs)

    def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for one in tar:
            if one.isreg() or one.isdir() or one.issym() or one.islnk():
                step(one.size if one.isreg() else 0)
                yield one

    with archive.open("rb") as file:
        if file.read(4) == _ZSTD:
            raise InvalidRequest(f"the archive of image {name!r} is compressed by zstd; {ALLOWED}")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(rootfs, members(tar), numeric_owner=True, filter=filtered)  # noqa: S202 - `filtered` checks each
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, UnicodeError) as error:
        why = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
        raise InvalidRequest(f"the archive of image {name!r} cannot be read ({why}); {ALLOWED}") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise InvalidRequest(
            f"the archive of image {name!r} has one path both as a folder and as a file ({error.filename}); allowed is "
            "each once"
        ) from error


def _checked(name: str, member: tarfile.TarInfo, rootfs: Path) -> tarfile.TarInfo:
    """The member under a name that is below the root; what stands in its place is removed."""
    path = _inside(name, member.name, rootfs)
    if member.islnk():
        linked = _inside(name, member.linkname, rootfs)
        member = member.replace(linkname=os.path.relpath(linked, rootfs), deep=False)
    if not member.isdir() and os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        path.unlink()  # a second member of one name is not written through what the first one left
    if member.isdir() and path.is_symlink():
        path.unlink()
    return member.replace(name=os.path.relpath(path, rootfs), deep=False)


def _inside(image: str, name: str, rootfs: Path) -> Path:
    """Where a name of the archive is; its folder, with all links followed, has to be below the root."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    path = rootfs.joinpath(*parts)
    folder = path.parent if parts else path
    if ".." in parts or not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(rootfs)):
        raise InvalidRequest(
            f"the archive of image {image!r} would write outside of it ({name[:200]!r}); allowed are names below "
            "its root"
        )
    return path


def check_root(name: str, rootfs: Path) -> None:
    """Raises `InvalidRequest` where no sandbox could be begun with this root."""
    for program in _SHELL:
        if not any(os.path.lexists(rootfs / folder / program) for folder in _PROGRAMS):
            saved = any((rootfs / one).exists() for one in ("manifest.json", "oci-layout"))
            more = "; an archive of `docker save` is none, one of `docker export` is" if saved else ""
            raise InvalidRequest(f"image {name!r} has no {program!r}; allowed is a root with sh and sleep{more}")
