"""Which environments a node keeps, and what is begun with meanwhile."""

import asyncio
from typing import Any, cast

import pytest

from opengyre.sandbox import environments
from opengyre.sandbox.core import Backend
from opengyre.sandbox.environments import Environments


class Kept:
    """What a backend does with snapshots; dropping one takes a while."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.dropping, self.go_on = asyncio.Event(), asyncio.Event()

    def snapshots(self) -> list[str]:
        return sorted(self.there)

    async def drop(self, snapshot: str) -> bool:
        self.dropping.set()
        await self.go_on.wait()
        self.there.discard(snapshot)
        return True


async def test_an_environment_that_is_being_dropped_is_made_anew_for_who_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was begun with, and the sandbox failed with the words that the snapshot was dropped: where more environments
    are in use than are kept, which is what training on many tasks is.
    """
    backend = Kept()
    kept = Environments(cast("Backend", backend), "n0")

    async def make(key: str, *_: Any) -> None:
        backend.there.add(key)

    monkeypatch.setattr(kept, "_make", make)
    monkeypatch.setattr(environments, "MOST", 1)
    monkeypatch.setattr(environments, "key_of", lambda environment, _: environment)

    async def wanted(name: Any) -> bool:
        key = await kept._kept(cast("Any", None), name, cast("Any", None))
        return key in backend.there

    assert await wanted("a")
    other = asyncio.ensure_future(wanted("b"))
    await backend.dropping.wait()
    again = asyncio.ensure_future(wanted("a"))
    await asyncio.sleep(0)
    backend.go_on.set()
    assert (await other, await again) == (True, True)
    assert backend.there == {"a"}
