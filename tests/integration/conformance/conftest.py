"""A node of each backend, and sandboxes on it, for the tests of what every backend does alike."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support import both_backends
from support.both_backends import Box, Node


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=both_backends.BOTH)
async def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    async with both_backends.started(request.param, tmp_path_factory.mktemp("node") / "n") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(node: Node) -> Box:
    """A sandbox that tests share which leave nothing in it that another one minds."""
    await node.create("shared", files={"in/a.txt": "hello\n"})
    return Box(node, "shared")


@pytest_asyncio.fixture(loop_scope="module")
async def box(node: Node, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    """A sandbox of the test's own."""
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    await node.create(name)
    yield Box(node, name)
    await node.manager.destroy(name)
