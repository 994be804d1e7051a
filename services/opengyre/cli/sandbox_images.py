"""`gyre sandbox image`: the images of the nodes on the bus.

What is added is copied into the blob store first, with its progress, and then unpacked by the node, which tells how far
it is; the copy in the store is dropped afterwards.
"""

import asyncio
import contextlib
import os
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from opengyre.cli.client import JsonOption, StateDirOption, console, errors, show_json, show_listing
from opengyre.cli.sandbox_client import MARGIN_S, NodeOption, ask, nodes, run
from opengyre.cli.sandbox_select import age
from opengyre.cli.stack import StackError
from opengyre.cli.stream_read import connected
from opengyre.cli.streams import NatsOption
from opengyre.cli.trajectory_files import blob_store
from opengyre.proto.sandbox_images import (
    AddImageRequest,
    ImageAdding,
    ImageInfo,
    ImageList,
    ImageRemoved,
    ImagesRequest,
    RemoveImageRequest,
)
from opengyre.shared.blobs import Blobs, reference_of
from opengyre.shared.bus import Bus, RpcFailedError
from opengyre.shared.settings import load

CHUNK = 1 << 20
WAIT_S = 2.0
"""Between two looks at how far a node is."""
Told = Callable[[int], None]
Name = Annotated[str, typer.Argument(help="Name of the image, which a sandbox or a task then names.")]


def register(sandbox: typer.Typer) -> None:
    image = typer.Typer(name="image", help="Look at, add and remove images of the nodes.", no_args_is_help=True)
    image.command("ls")(ls)
    image.command("add")(add)
    image.command("rm")(rm)
    sandbox.add_typer(image)


async def _listing(bus: Bus, node: str | None) -> list[tuple[str, ImageList]]:
    return [(name, await ask(bus, name, "images", ImagesRequest(), ImageList)) for name in await nodes(bus, node)]


def ls(
    node: NodeOption = None, nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """List the images of all nodes.

    Example: gyre sandbox image ls
    """

    async def work() -> list[tuple[str, ImageList]]:
        async with connected(nats, state_dir) as bus:
            return await _listing(bus, node)

    found = run(work())
    if json:
        show_json([image for _, listed in found for image in listed.images])
        return
    table = Table("image", "node", "size", "last used", "in use")
    for _, listed in found:
        for image in listed.images:
            used = "-" if image.used_at is None else f"{age(time.time() - image.used_at)} ago"
            table.add_row(image.image, image.node, size(image.size), used, "yes" if image.in_use else "no")
    show_listing(table)
    for name, listed in found:
        if listed.limit is not None:
            held = size(sum(image.size for image in listed.images))
            console.print(f"{name}: {held} of {size(listed.limit)}", markup=False, soft_wrap=True)


def size(count: int) -> str:
    """Bytes in words: `12 B`, `3.4 MB`."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def add(
    name: Name,
    source: Annotated[str, typer.Argument(help="Tar archive of a root (.tar, .gz, .bz2, .xz), or the root's folder.")],
    on_node: Annotated[
        bool, typer.Option("--on-node", help="SOURCE is on the node already, below one of its sandbox.image_roots.")
    ] = False,
    node: NodeOption = None,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Add an image to all nodes, in the place of one of that name, from what `docker export` writes or a folder.

    Example: gyre sandbox image add debian ./debian.tar.gz
    """
    if on_node and not source.startswith("/"):
        raise StackError(f"SOURCE is {source!r}; allowed with --on-node is an absolute path of the node")
    if not on_node and not Path(source).exists():
        raise StackError(f"SOURCE is {source!r}, which is not there; allowed is a tar archive or a folder")

    async def work() -> list[ImageInfo]:
        async with connected(nats, state_dir) as bus:
            targets = await nodes(bus, node)
            with _progress() as shown:
                if on_node:
                    request = AddImageRequest(image=name, path=source, wait_s=WAIT_S)
                    return [await _add(bus, target, request, shown) for target in targets]
                async with _stored(Path(source), state_dir, shown) as blob:
                    request = AddImageRequest(image=name, blob=blob, wait_s=WAIT_S)
                    return [await _add(bus, target, request, shown) for target in targets]

    added = run(work())
    if json:
        show_json(added)
        return
    for image in added:
        console.print(f"{image.image} is on {image.node}: {size(image.size)}", markup=False, soft_wrap=True)


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


async def _add(bus: Bus, node: str, request: AddImageRequest, shown: Progress) -> ImageInfo:
    row = shown.add_task(f"unpacked on {node}", total=None)
    while True:
        try:
            told = await ask(bus, node, "add_image", request, ImageAdding, WAIT_S + MARGIN_S)
        except RpcFailedError as error:
            if request.blob is None or request.blob not in str(error):
                raise
            raise StackError(
                f"node {node!r} has another blob store than this command; bring SOURCE to the node, below one of its "
                "sandbox.image_roots, and add it with --on-node"
            ) from error
        shown.update(row, completed=told.unpacked)
        if told.done and told.info is not None:
            return told.info


@contextlib.asynccontextmanager
async def _stored(source: Path, state_dir: Path | None, shown: Progress) -> AsyncIterator[str]:
    """Reference of the archive in the blob store for as long as the block lasts."""
    folder = blob_store(state_dir)
    async with Blobs(folder, load().cache) as blobs:
        row = shown.add_task("copied to the blob store", total=None)
        interrupted = threading.Event()

        def copied(count: int) -> None:
            if interrupted.is_set():
                raise InterruptedError("interrupted")
            shown.advance(row, count)

        try:
            with contextlib.ExitStack() as made:
                beside = await asyncio.to_thread(_beside, source, folder, copied)
                made.callback(beside.unlink, missing_ok=True)
                known = blobs.path(await asyncio.to_thread(reference_of, beside)).exists()
                blob = await blobs.put_file(beside)
        except asyncio.CancelledError:
            interrupted.set()  # the thread would copy on to its end, and this process would wait for it
            raise
        except OSError as error:
            raise StackError(f"{source} could not be copied to the blob store in {folder}: {error}") from error
        try:
            yield blob
        finally:
            if not known:  # somebody else's stays
                await blobs.discard(blob)


def _beside(source: Path, folder: Path, told: Told) -> Path:
    """An archive of the source in a new file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".tmp-image-")
    os.close(handle)
    try:
        (_pack if source.is_dir() else _copy)(source, Path(name), told)
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _copy(source: Path, target: Path, told: Told) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        while chunk := old.read(CHUNK):
            new.write(chunk)
            told(len(chunk))


def _pack(source: Path, target: Path, told: Told) -> None:
    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None  # devices and the like are no part of an image
        told(member.size)
        return member

    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(source, ".", filter=counted)


def rm(
    name: Name, node: NodeOption = None, nats: NatsOption = None, state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Remove an image from the nodes that have it; refused while a sandbox or a snapshot stands on it.

    Example: gyre sandbox image rm debian
    """

    async def work() -> list[Any]:
        async with connected(nats, state_dir) as bus:
            found = await _listing(bus, node)
            having = [one for one, listed in found if _has(listed, name)]
            if not having:
                known = sorted({image.image for _, listed in found for image in listed.images})
                raise StackError(f"image {name[:120]!r} is on no node; there are: {', '.join(known) or 'none'}")
            request = RemoveImageRequest(image=name)
            return [(one, await ask(bus, one, "remove_image", request, ImageRemoved, MARGIN_S)) for one in having]

    removed = run(work())
    if json:
        show_json([{"image": gone.image, "node": one, "freed": gone.freed} for one, gone in removed])
        return
    for one, gone in removed:
        console.print(f"{gone.image} is removed from {one}: {size(gone.freed)}", markup=False, soft_wrap=True)


def _has(listed: ImageList, name: str) -> bool:
    return any(image.image in (name, f"{name}:latest") for image in listed.images)
