"""Which run and which version a host follows."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.allocator.choose import current
from opengyre.host import versions
from opengyre.host.versions import LAST_RETRY_S, chosen_run, follow_published, replaces, retry_after
from opengyre.proto import codec, subjects
from opengyre.proto.base import tag_of
from opengyre.proto.run import RunSpec
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import BusUnavailableError, Stored
from opengyre.trainer.service import active_run


def manifest(run: str, version: int, directory: str = "/w") -> Manifest:
    return Manifest(run=run, version=version, parent=None, step=0, directory=directory, files=())


def test_the_active_run_is_followed_else_the_last_that_changed() -> None:
    a, b = RunSpec(run="a", model="m"), RunSpec(run="b", model="m", state="finished")
    c = RunSpec(run="c", model="m", state="stopped")
    assert chosen_run({}, {}) is None
    assert chosen_run({"a": a, "b": b, "c": c}, {"a": 1, "b": 2, "c": 3}) == "a"
    assert chosen_run({"b": b, "c": c}, {"b": 2, "c": 3}) == "c"


def test_of_several_active_runs_the_one_that_is_led_is_served() -> None:
    """Allocator and trainer take the one that has waited longest; episodes of it would find no host otherwise."""
    runs = {name: RunSpec(run=name, model="m") for name in ("a", "b")}
    revisions = {"a": 5, "b": 3}
    led = current(runs, revisions)
    trained = active_run(runs, revisions)
    assert led is not None
    assert trained is not None
    assert chosen_run(runs, revisions) == led.run == trained.run == "b"


def test_only_a_newer_version_or_the_same_published_anew_replaces() -> None:
    assert replaces(None, manifest("a", 0))
    assert replaces(manifest("a", 3), manifest("b", 0))
    assert replaces(manifest("a", 3), manifest("a", 3, "/elsewhere"))
    assert not replaces(manifest("a", 3), manifest("a", 3))
    assert not replaces(manifest("a", 3), manifest("a", 2))


@given(st.lists(st.integers(0, 50)))
def test_versions_of_a_run_only_grow_in_whatever_order_they_come(found: list[int]) -> None:
    current: Manifest | None = None
    served: list[int] = []
    for version in found:
        if replaces(current, candidate := manifest("a", version)):
            current = candidate
            served.append(version)
    assert served == sorted(set(served))
    assert (current.version if current else None) == max(found, default=None)


def test_a_refused_version_is_read_again_ever_more_slowly_and_bounded() -> None:
    delays = [retry_after(n) for n in range(100)]
    assert delays == sorted(delays)
    assert delays[0] < 1
    assert delays[-1] == LAST_RETRY_S


async def test_a_host_waits_for_a_broker_that_is_long_away_as_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended, with all calls that it had."""

    class Away:
        asked = 0

        async def last(self, *_: str) -> None:
            self.asked += 1
            if self.asked == 1:
                raise BusUnavailableError("did not answer in 12 attempts")

    async def published(*_: Any, start: int) -> AsyncIterator[Stored]:
        event = WeightsPublished(run="a", manifest=manifest("a", start))
        yield Stored(subjects.weights("a", "published"), start, codec.encode(event), {"Gyre-Type": tag_of(event)})

    monkeypatch.setattr(versions, "follow", published)
    found: list[Manifest] = []
    bus: Any = Away()
    await follow_published(bus, "a", found.append)
    assert (bus.asked, [one.version for one in found]) == (2, [1])
