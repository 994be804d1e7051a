"""`gyre sandbox image` on a real bus with a real sandbox service: images come, are used, stay while used, and go."""

import asyncio
import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opengyre.proto.sandbox import (
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    SandboxRef,
    SandboxSpec,
)
from opengyre.proto.sandbox_images import AddImageRequest, ImageAdding, ImageList, ImagesRequest
from opengyre.shared.bus import Bus, RpcFailedError, call
from support import eventually
from support.gyre_command import Gyre
from support.rootfs import needs_root, rootfs
from support.sandboxes import needs_sandboxes

pytestmark = [pytest.mark.sandbox, needs_sandboxes, needs_root]
CACHE_MB = 48


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `root`, the folder of a small root, and `root.tar.gz`, its archive."""
    folder = tmp_path_factory.mktemp("images")
    with tarfile.open(folder / "root.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(rootfs(folder / "root"), ".")
    return folder


class Service:
    """The service of node `n6`, that takes images from below one folder."""

    def __init__(self, url: str, state: Path, places: Path) -> None:
        self.state = state
        self.environment = {
            **os.environ, "GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(state), "GYRE_SANDBOX__NODE": "n6",
            "GYRE_SANDBOX__IMAGE_CACHE_MB": str(CACHE_MB), "GYRE_SANDBOX__IMAGE_ROOTS": str(places),
        }  # fmt: skip
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.state.parent / "service.log").open("ab") as out:
            command = [sys.executable, "-m", "opengyre.sandbox"]
            self.process = await asyncio.create_subprocess_exec(*command, env=self.environment, stdout=out, stderr=out)

    async def stop(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(60):
            expected = 0 if number is signal.SIGTERM else -number
            assert await self.process.wait() == expected, (self.state.parent / "service.log").read_text()[-3000:]

    @property
    def cache(self) -> Path:
        return self.state / "sandbox" / "n6" / "images"

    def left(self) -> list[str]:
        """What is in the cache and in the blob store, half-made things too."""
        found = [path.name for path in self.cache.iterdir()] if self.cache.is_dir() else []
        return sorted(found + [path.name for path in (self.state / "blobs").rglob("*") if path.is_file()])


@pytest.fixture
async def service(bus: Bus, nats_server, tmp_path: Path, places: Path) -> AsyncIterator[Service]:
    made = Service(nats_server.url, tmp_path / "state", places)
    await made.start()
    yield made
    await made.stop(signal.SIGTERM)


@pytest.fixture
async def gyre(service: Service, nats_server) -> Gyre:
    made = Gyre(nats_server.url, service.state)

    async def answers() -> bool:
        return (await made("sandbox", "image", "ls"))[0] == 0

    await eventually(answers, 60.0)
    return made


async def ask(bus: Bus, verb: str, request, reply):
    return await call(bus, "sandbox", "n6", verb, request, reply, timeout_s=30, patience_s=60)


async def test_images_are_added_used_listed_and_removed(gyre: Gyre, service: Service, bus: Bus, places: Path) -> None:
    status, shown, _ = await gyre("sandbox", "image", "add", "packed", str(places / "root.tar.gz"))
    assert (status, shown.startswith("packed is on n6: ")) == (0, True), shown
    status, shown, _ = await gyre("sandbox", "image", "add", "folder", str(places / "root"), "--json")
    assert [(one["image"], one["node"], one["in_use"]) for one in json.loads(shown)] == [("folder", "n6", False)]
    status, _, said = await gyre("sandbox", "image", "add", "here", str(places / "root"), "--on-node")
    assert (status, said) == (0, ""), said
    assert service.left() == ["folder", "here", "packed"], "nothing of it stays in the blob store"

    status, shown, _ = await gyre("sandbox", "image", "ls", "--json")
    first = json.loads(shown)
    assert [one["image"] for one in first] == ["folder", "here", "packed"]
    assert len({one["size"] for one in first}) == 1, "one root in three ways"
    assert first[0]["size"] > 1 << 20
    for name in ("packed", "folder", "here"):
        await ask(bus, "create", SandboxSpec(sandbox="s", owner="o", image=name, disk_mb=8), SandboxRef)
        text = "cat /etc/base; stat -c '%u %a' /etc/base; echo new >/etc/base"
        done = await ask(bus, "exec", ExecRequest(sandbox="s", exec_id="e", command=text, timeout_s=20), ExecResult)
        assert done.stdout == "of the image\n0 644\n"
        status, shown, _ = await gyre("sandbox", "image", "ls", "--json")
        assert [one["image"] for one in json.loads(shown) if one["in_use"]] == [name]
        status, _, said = await gyre("sandbox", "image", "rm", name)
        assert (status, f"image '{name}' is in use; destroy its sandboxes" in said) == (1, True)
        status, _, said = await gyre("sandbox", "image", "add", name, str(places / "root"))
        assert (status, f"image '{name}' is in use" in said) == (1, True), "nor is it replaced under them"
        await ask(bus, "destroy", DestroyRequest(sandbox="s"), DestroyResult)
    status, shown, _ = await gyre("sandbox", "image", "ls")
    assert all(word in shown for word in ("folder", "n6", "ago", "MB of 50.3 MB")), shown

    status, shown, _ = await gyre("sandbox", "image", "rm", "here", "--node", "n6")
    assert (status, shown.startswith("here is removed from n6: ")) == (0, True)
    status, shown, _ = await gyre("sandbox", "image", "rm", "folder", "--json")
    assert json.loads(shown) == [{"image": "folder", "node": "n6", "freed": first[0]["size"]}]
    assert service.left() == ["packed"]


def archive(path: Path, **files: int) -> str:
    """An archive of a root with more files of so many bytes."""
    with tarfile.open(path, "w") as tar:
        for name, size in {"bin/sh": 1, "bin/sleep": 1, **files}.items():
            member = tarfile.TarInfo(name)
            member.size = size
            tar.addfile(member, io.BytesIO(bytes(size)))
    return str(path)


async def test_what_cannot_be_an_image_is_said_and_leaves_nothing(
    gyre: Gyre, service: Service, places: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "bare").mkdir()
    escape = tmp_path / "escape.tar"
    with tarfile.open(escape, "w") as tar:
        tar.addfile(tarfile.TarInfo("../../../etc/gyre-was-here"))
    large = archive(tmp_path / "large.tar", big=(CACHE_MB << 20) + 1)
    faults = (
        (("add", "x", str(tmp_path / "none")), "which is not there; allowed is a tar archive or a folder"),
        (("add", "x", str(tmp_path / "text")), "the archive of image 'x' cannot be read"),
        (("add", "x", str(escape)), "would write outside of it"),
        (("add", "x", large), f"allowed are {CACHE_MB << 20} (sandbox.image_cache_mb)"),
        (("add", "x", str(tmp_path / "bare")), "image 'x' has no 'sh'; allowed is a root with sh and sleep"),
        (("add", "../x", str(places / "root")), "image is '..'; allowed are 1 to 128 of"),
        (("add", "x", str(tmp_path), "--on-node"), f"allowed is a folder below {places}"),
        (("add", "x", str(places / "none"), "--on-node"), f"which is not there; allowed is one below {places}"),
        (("add", "x", "root", "--on-node"), "allowed with --on-node is an absolute path"),
        (("add", "x", str(places / "root"), "--node", "n9"), "node 'n9' does not answer; there are: n6"),
        (("rm", "x"), "image 'x' is on no node; there are: none"),
    )
    for arguments, expected in faults:
        status, _, said = await gyre("sandbox", "image", *arguments)
        assert (status, expected in said) == (1, True), (arguments, said)
        assert service.left() == [], arguments


async def test_row_38_an_addition_that_is_cut_off_leaves_nothing_and_is_asked_for_again(
    gyre: Gyre, service: Service, bus: Bus, places: Path
) -> None:
    """First by a stop of the service, then by its crash; nobody waits, so that it is under way when it is cut off."""
    archive(places / "slow.tar", **{f"part{number}": 1 << 20 for number in range(30)})
    request = AddImageRequest(image="slow", path=str(places / "slow.tar"), wait_s=0.0)
    for number in (signal.SIGTERM, signal.SIGKILL):
        told = await ask(bus, "add_image", request, ImageAdding)
        assert (told.done, told.info) == (False, None)
        await service.stop(number)
        await service.start()
        await ask(bus, "images", ImagesRequest(), ImageList)
        assert service.left() in ([], ["slow"]), "whole or not at all"
    async with asyncio.timeout(120):
        while not told.done:
            again = AddImageRequest(image="slow", path=str(places / "slow.tar"), wait_s=20)
            told = await ask(bus, "add_image", again, ImageAdding)
    assert told.info is not None
    assert (told.unpacked, told.info.size > 30 << 20) == ((30 << 20) + 2, True)
    with pytest.raises(RpcFailedError, match="blob and path are both given or both missing"):
        await ask(bus, "add_image", AddImageRequest(image="slow"), ImageAdding)
    with pytest.raises(RpcFailedError, match="blob is 'sha256:0'"):
        await ask(bus, "add_image", AddImageRequest(image="slow", blob="sha256:0"), ImageAdding)
