"""What an archive of an image may not do, and what it keeps."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from opengyre.sandbox import image_archive
from opengyre.sandbox.core import InvalidRequest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners of an image's files are set by root")
Mode = Literal["w", "w:gz", "w:bz2", "w:xz"]
Entry = tuple[str, bytes, str]
"""Name, type, and where a link leads or what a file holds."""


def archive(tmp_path: Path, *entries: Entry, mode: Mode = "w", bits: int = 0o644) -> Path:
    path = tmp_path / "image.tar"
    with tarfile.open(path, mode) as tar:
        for name, kind, text in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid = kind, bits, 1234
            if kind == tarfile.REGTYPE:
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
            else:
                member.linkname = text
                tar.addfile(member)
    return path


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[[Path], Path]:
    (tmp_path / "outside").write_text("untouched")

    def work(path: Path) -> Path:
        rootfs = tmp_path / "rootfs"
        rootfs.mkdir()
        image_archive.unpack("i", path, rootfs, lambda _: None)
        return rootfs

    return work


FILE, LINK, HARD, FOLDER, FIFO = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [("../outside", FILE, "bad")],
        [("a/../../outside", FILE, "bad")],
        [("up", LINK, ".."), ("up/outside", FILE, "bad")],
        [("up", LINK, ".."), ("up/new", FOLDER, "")],
        [("hard", HARD, "../outside"), ("hard", FILE, "bad")],
        [("up", LINK, ".."), ("hard", HARD, "up/outside")],
        [("a", FOLDER, ""), ("a/up", LINK, "../.."), ("a/up/new", LINK, "x")],
    ],
)
def test_an_archive_that_leads_outside_is_refused(
    tmp_path: Path, unpack: Callable[[Path], Path], entries: list[Entry]
) -> None:
    with pytest.raises(InvalidRequest, match="would write outside of it"):
        unpack(archive(tmp_path, *entries))
    assert (tmp_path / "outside").read_text() == "untouched"
    assert (tmp_path / "outside").stat().st_nlink == 1
    assert not (tmp_path / "new").exists()


def test_a_second_member_of_a_name_is_not_written_through_the_link_that_stood_there(
    tmp_path: Path, unpack: Callable[[Path], Path]
) -> None:
    made = unpack(archive(tmp_path, ("x", LINK, "../outside"), ("x", FILE, "in"), ("d", LINK, ".."), ("d", FOLDER, "")))
    assert (tmp_path / "outside").read_text() == "untouched"
    assert ((made / "x").read_text(), (made / "x").is_symlink(), (made / "d").is_symlink()) == ("in", False, False)


def test_modes_owners_and_links_are_kept_and_what_is_special_is_not(
    tmp_path: Path, unpack: Callable[[Path], Path]
) -> None:
    made = unpack(
        archive(
            tmp_path, ("/bin/su", FILE, "x"), ("abs", LINK, "/etc/passwd"), ("bin/also", HARD, "/bin/su"),
            ("pipe", FIFO, ""), ("tmp", FOLDER, ""), bits=0o4777,
        )
    )  # fmt: skip
    found = (made / "bin/su").stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_nlink) == (0o4777, 1234, 2)
    assert (made / "abs").readlink() == Path("/etc/passwd")
    assert sorted(path.name for path in made.iterdir()) == ["abs", "bin", "tmp"]
    assert (made / "tmp").stat().st_mode & 0o7777 == 0o4777


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archives_are_plain_or_compressed(tmp_path: Path, unpack: Callable[[Path], Path], mode: Mode) -> None:
    assert (unpack(archive(tmp_path, ("a", FILE, "1"), mode=mode)) / "a").read_text() == "1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no archive", "cannot be read .*allowed is a tar archive, plain or compressed by gzip, bzip2 or xz"),
        (b"", "cannot be read"),
        (b"\x28\xb5\x2f\xfd....", "is compressed by zstd; allowed is"),
        (gzip.compress(b"no archive"), "cannot be read"),
        (gzip.compress(os.urandom(5000))[:2000], "cannot be read"),
    ],
    ids=["text", "nothing", "zstd", "gzip of text", "torn gzip"],
)
def test_what_is_no_archive_is_said(tmp_path: Path, unpack: Callable[[Path], Path], content: bytes, said: str) -> None:
    (tmp_path / "image.tar").write_bytes(content)
    with pytest.raises(InvalidRequest, match=said):
        unpack(tmp_path / "image.tar")


def test_a_torn_archive_is_said(tmp_path: Path, unpack: Callable[[Path], Path]) -> None:
    whole = archive(tmp_path, ("a", FILE, "1" * 5000), ("b", FILE, "2" * 5000))
    whole.write_bytes(whole.read_bytes()[:7000])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        unpack(whole)


def test_a_root_needs_what_a_sandbox_begins_with(tmp_path: Path, unpack: Callable[[Path], Path]) -> None:
    made = unpack(archive(tmp_path, ("usr/bin/sh", FILE, ""), ("manifest.json", FILE, "[]")))
    with pytest.raises(InvalidRequest, match=r"has no 'sleep'; .* `docker save` is none, one of `docker export` is"):
        image_archive.check_root("i", made)
    (made / "usr/bin/sleep").write_text("")
    image_archive.check_root("i", made)
