"""What comes while a node is between two steps of something else: a removal, a look, the same call once more."""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from opengyre.proto.sandbox import ForwardRequest
from opengyre.proto.sandbox_trees import ForkRequest, RestoreRequest, SnapshotRequest
from opengyre.sandbox.core import InfraError, SandboxError, SandboxGone, Spec
from opengyre.sandbox.node import Node as Full
from support import both_backends
from support.both_backends import Box, Node

pytestmark = pytest.mark.sandbox
STEPS = {"docker": "_container", "bubblewrap": "_build"}
"""What makes a sandbox's processes."""


@pytest.fixture(params=both_backends.BOTH)
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(request.param, tmp_path / "n")
    made.manager = Full(made.backend, "n0", both_backends.DEFAULTS)
    async with both_backends.ready(made):
        yield made
        for snapshot in made.backend.snapshots():
            await made.backend.drop(snapshot)


def manager_of(node: Node) -> Full:
    assert isinstance(node.manager, Full)
    return node.manager


class Held:
    """A step of a backend that waits, once it was come to, until it may go on."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.come, self.go_on = asyncio.Event(), asyncio.Event()
        step = getattr(owner, name)

        async def held(*given: Any, **more: Any) -> Any:
            self.come.set()
            await self.go_on.wait()
            return await step(*given, **more)

        monkeypatch.setattr(owner, name, held)


async def kept(node: Node) -> None:
    """A sandbox ``s`` and its snapshot ``kept``."""
    await node.create("s", files={"a": "kept"})
    await manager_of(node).snapshot(SnapshotRequest(sandbox="s", snapshot="kept"))


async def test_a_sandbox_that_is_removed_while_it_is_restored_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Its container was made after the removal, and nobody knew of it: it stayed until the next start."""
    await kept(node)
    held = Held(node.backend, STEPS[node.kind], monkeypatch)
    restoring = asyncio.ensure_future(manager_of(node).restore(RestoreRequest(sandbox="s", snapshot="kept")))
    await held.come.wait()
    await node.manager.destroy("s")
    held.go_on.set()
    with pytest.raises(SandboxError):
        await restoring
    assert await node.left() == []
    assert node.manager.count() == 0


async def test_sandboxes_are_listed_while_one_is_restored(node: Node, monkeypatch: pytest.MonkeyPatch):
    """The list of all of a node's was refused, as one had no processes for a moment."""
    await kept(node)
    await node.create("other")
    held = Held(node.backend, STEPS[node.kind], monkeypatch)
    restoring = asyncio.ensure_future(manager_of(node).restore(RestoreRequest(sandbox="s", snapshot="kept")))
    await held.come.wait()
    assert {info.sandbox for info in node.manager.listing({})} == {"s", "other"}
    held.go_on.set()
    await restoring
    assert (await Box(node, "s").run("cat a")).stdout == "kept"


async def test_a_sandbox_whose_restoration_failed_keeps_no_other_from_being_listed(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    await kept(node)
    await node.create("other")

    async def fail(*_: Any) -> None:
        raise SandboxGone("it is made to fail")

    monkeypatch.setattr(node.backend, STEPS[node.kind], fail)
    with pytest.raises(SandboxGone):
        await manager_of(node).restore(RestoreRequest(sandbox="s", snapshot="kept"))
    assert {info.sandbox for info in node.manager.listing({})} == {"other"}
    with suppress(SandboxGone):
        await node.manager.destroy("s")


async def test_sandboxes_are_forked_once_for_their_names_also_at_once(node: Node):
    """Both made the same sandbox, and each removed what the other one had made of it."""
    await kept(node)
    request = ForkRequest(snapshot="kept", sandboxes=("f1", "f2"), owner="test")
    first, second = await asyncio.gather(*(manager_of(node).fork(request) for _ in range(2)))
    assert [ref.sandbox for ref in first.sandboxes] == [ref.sandbox for ref in second.sandboxes] == ["f1", "f2"]
    assert (await Box(node, "f2").run("cat a")).stdout == "kept"


async def test_the_reaper_leaves_another_sandbox_of_the_same_id_alone(node: Node, monkeypatch: pytest.MonkeyPatch):
    """It had looked at all of them first, and removed one after the other by what it had seen then."""
    for name in ("a", "b"):
        await node.create(name)
        held = node.manager._known[name]
        held.lease = dataclasses.replace(held.lease, expires_at=0.0)
    removing = Held(node.backend, "destroy", monkeypatch)
    seen = asyncio.Event()
    alive = node.backend.alive

    async def look(name: str) -> bool:
        if node.manager.count() == 1:
            seen.set()
        return await alive(name)

    monkeypatch.setattr(node.backend, "alive", look)
    reaping = asyncio.ensure_future(node.manager.reap())
    await removing.come.wait()
    removing.go_on.set()
    await node.manager.destroy("b")
    await node.create("b")
    async with asyncio.timeout(30):
        await seen.wait()
    assert (await Box(node, "b").run("echo lives")).stdout == "lives\n"
    reaping.cancel()


async def test_the_reaper_that_looks_while_a_sandbox_is_restored_leaves_it(node: Node, monkeypatch: pytest.MonkeyPatch):
    """Its look, in a thread, found the processes that were there before it gone."""
    await kept(node)
    looked, told = asyncio.Event(), asyncio.Event()

    async def look(_: str) -> bool:
        looked.set()
        await told.wait()
        return False

    monkeypatch.setattr(node.backend, "alive", look)
    looking = asyncio.ensure_future(node.manager._due())
    await looked.wait()
    held = Held(node.backend, STEPS[node.kind], monkeypatch)
    restoring = asyncio.ensure_future(manager_of(node).restore(RestoreRequest(sandbox="s", snapshot="kept")))
    await held.come.wait()
    told.set()
    assert await looking == []
    held.go_on.set()
    await restoring


async def test_a_sandbox_is_removed_once_whoever_else_removes_it(node: Node, monkeypatch: pytest.MonkeyPatch):
    """The later end of the second removal, as the reaper begins one of all that is being removed, was the end of a
    sandbox that had been made with the same id in between.
    """
    await node.create("s")
    removed: list[str] = []
    destroy = node.backend.destroy

    async def slow(name: str) -> None:
        removed.append(name)
        await asyncio.sleep(0.05 * len(removed))
        await destroy(name)

    monkeypatch.setattr(node.backend, "destroy", slow)
    first = asyncio.ensure_future(node.manager.destroy("s"))
    second = asyncio.ensure_future(node.manager.destroy("s"))
    await first
    await node.create("s")
    await second
    assert removed == ["s"]
    assert (await Box(node, "s").run("echo lives")).stdout == "lives\n"


async def test_snapshots_of_a_sandbox_are_taken_one_after_the_other(node: Node, monkeypatch: pytest.MonkeyPatch):
    """What ran went on when the first of two was done, while the other one read still; and of two with one id each
    wrote into the files of the other.
    """
    await node.create("s", files={"a": "kept"})
    taken: list[str] = []
    under_way: set[str] = set()
    snapshot = node.backend.snapshot

    async def counted(spec: Spec, name: str) -> int:
        assert not under_way
        under_way.add(name)
        try:
            return await snapshot(spec, name)
        finally:
            under_way.discard(name)
            taken.append(name)

    monkeypatch.setattr(node.backend, "snapshot", counted)
    calls = [SnapshotRequest(sandbox="s", snapshot=name) for name in ("one", "one", "two")]
    found = await asyncio.gather(*(manager_of(node).snapshot(call) for call in calls))
    assert found[0].size == found[1].size > 0
    assert taken == ["one", "two"]
    await manager_of(node).fork(ForkRequest(snapshot="one", sandboxes=("f",), owner="test"))
    assert (await Box(node, "f").run("cat a")).stdout == "kept"


async def test_the_reaper_tries_a_snapshot_again_that_cannot_be_dropped_now(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """An engine that did not answer once ended the service."""
    await node.create("s")
    await manager_of(node).snapshot(SnapshotRequest(sandbox="s", snapshot="short", ttl_s=0.05))
    drop, faults = node.backend.drop, [InfraError("the engine does not answer")]

    async def fails_once(name: str) -> bool:
        if faults:
            raise faults.pop()
        return await drop(name)

    monkeypatch.setattr(node.backend, "drop", fails_once)
    reaping = asyncio.ensure_future(node.manager.reap())

    async def gone() -> bool:
        return reaping.done() or node.backend.snapshots() == []

    await both_backends.until(gone)
    assert not reaping.done()
    reaping.cancel()


async def test_a_port_that_is_opened_while_its_sandbox_is_removed_is_closed(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Its listener stayed for as long as the service did, and the caller heard that the port was open."""
    await node.create("s")
    opened: list[socket.socket] = []
    listen = node.backend.listen

    async def listening(sandbox: str, port: int) -> socket.socket:
        opened.append(await listen(sandbox, port))
        await node.manager.destroy(sandbox)
        return opened[-1]

    monkeypatch.setattr(node.manager._forwards, "_listen", listening)
    with pytest.raises(SandboxGone):
        await node.manager.forward(ForwardRequest(sandbox="s", port=8080, host="127.0.0.1", target_port=9))
    await both_backends.until(partial(is_closed, opened[0]))


async def is_closed(one: socket.socket) -> bool:
    return one.fileno() < 0
