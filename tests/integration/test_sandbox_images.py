"""The cache of images: what is replaced, and what is another cache's."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opengyre.sandbox import images
from opengyre.sandbox.core import SandboxBusy

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners of an image's files are set by root")
KB = 1 << 10
ABOUT = images.Image(size=0, user="worker")


@pytest.fixture
def root(tmp_path: Path) -> Callable[[int], Path]:
    """A root of programs that are so many bytes large."""

    def make(size: int) -> Path:
        folder = tmp_path / f"root{size}"
        (folder / "bin").mkdir(parents=True)
        for name in ("sh", "sleep"):
            (folder / "bin" / name).write_bytes(b"x" * (size // 2))
            os.chown(folder / "bin" / name, 7, 8)
            (folder / "bin" / name).chmod(0o4755)
        os.chown(folder / "bin", 9, 10)
        return folder

    return make


def test_an_image_that_finds_no_room_does_not_cost_the_one_that_it_was_to_replace(
    tmp_path: Path, root: Callable[[int], Path]
) -> None:
    used = set[str]()
    cache = images.Images(tmp_path / "cache", 100 * KB, lambda: used)
    cache.add_layers("held", [root(64 * KB)], ABOUT)
    cache.add_layers("mine", [root(16 * KB)], ABOUT)
    used.add("held")
    with pytest.raises(SandboxBusy, match="full of images in use"):
        cache.add_layers("mine", [root(72 * KB)], ABOUT)
    assert {one.name: one.size for one in cache.info()} == {"held": 64 * KB, "mine": 16 * KB}
    # In its own place there is room for as much as it leaves.
    cache.add_layers("mine", [root(32 * KB)], ABOUT)
    assert {one.name: one.size for one in cache.info()} == {"held": 64 * KB, "mine": 32 * KB}


def test_an_image_of_another_cache_is_used_without_a_copy_and_outlives_it(
    tmp_path: Path, root: Callable[[int], Path]
) -> None:
    theirs = images.Images(tmp_path / "theirs", 100 * KB)
    theirs.add_layers("debian", [root(32 * KB)], ABOUT)
    ours = images.Images(tmp_path / "ours", 100 * KB, beside=theirs)
    assert ours.names() == ["debian"]
    assert ours.info() == []
    found = ours.get("debian")
    assert found is not None
    folder, about = found
    assert (folder, about.user) == (tmp_path / "ours" / "debian" / "rootfs", "worker")
    one, other = folder / "bin" / "sh", tmp_path / "theirs" / "debian" / "rootfs" / "bin" / "sh"
    assert one.samefile(other)
    assert (one.stat().st_mode & 0o7777, one.stat().st_uid, one.stat().st_gid) == (0o4755, 7, 8)
    assert ((folder / "bin").stat().st_uid, (folder / "bin").stat().st_gid) == (9, 10)
    theirs.remove("debian")
    assert one.stat().st_size == 16 * KB
    assert ours.names() == ["debian"]
    assert ours.get("nosuch") is None
