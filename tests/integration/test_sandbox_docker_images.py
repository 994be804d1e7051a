"""Images of a Docker engine: imported from a root's archive, used, listed, removed."""

import tarfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.sandbox.core import InvalidRequest, SandboxBusy
from support import both_backends
from support.both_backends import Node
from support.rootfs import rootfs

pytestmark = [pytest.mark.sandbox, both_backends.needs["docker"]]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with both_backends.started("docker", tmp_path / "n") as made:
        yield made


async def test_an_image_is_imported_used_and_removed(node: Node, tmp_path: Path) -> None:
    rootfs(tmp_path / "root")
    archive = tmp_path / "root.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(tmp_path / "root", ".")
    name = f"gyre-test-{uuid.uuid4().hex[:8]}"
    told: list[int] = []
    added = await node.backend.add_image(name, archive, told.append)
    try:
        assert (added.name, added.in_use, sum(told)) == (f"{name}:latest", False, archive.stat().st_size)
        assert added.size > 1 << 20
        listed, limit = await node.backend.image_list()
        assert (added in listed, limit) == (True, None)
        await node.create("s", image=name)
        assert (await both_backends.Box(node, "s").run("cat /etc/base")).stdout == "of the image\n"
        with pytest.raises(SandboxBusy, match=f"image '{name}' is in use; destroy its sandboxes"):
            await node.backend.remove_image(name)
        await node.manager.destroy("s")
    finally:
        assert await node.backend.remove_image(name) == added.size
    with pytest.raises(
        InvalidRequest, match=f"image is '{name}'; allowed are those of this engine: .*{both_backends.IMAGE}"
    ):
        await node.backend.remove_image(name)


async def test_what_is_no_archive_or_is_cut_off_leaves_no_image(node: Node, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive" * 1000)
    before = await node.backend.image_list()
    with pytest.raises(InvalidRequest, match="image 'gyre-test-none' could not be imported: "):
        await node.backend.add_image("gyre-test-none", tmp_path / "text", lambda _: None)

    def stopped(_: int) -> None:
        raise SandboxBusy("the service stops")

    with pytest.raises(SandboxBusy, match="the service stops"):
        await node.backend.add_image("gyre-test-none", tmp_path / "text", stopped)
    assert await node.backend.image_list() == before
    with pytest.raises(InvalidRequest, match="needs the capability 'root_directories'"):
        node.backend.image_source("/etc")
