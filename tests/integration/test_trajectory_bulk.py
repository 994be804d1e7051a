"""Calls whose ids are too large for a message: in the blob store, and with what they said in a group all the same."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from pyarrow import parquet

from opengyre.cli.trajectory_export import WRITERS, export
from opengyre.cli.trajectory_files import open_log
from opengyre.formats import Forest, read_tree
from opengyre.learn import gradient
from opengyre.proto import codec, subjects
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.explain import ExplainReport, ExplainRequest
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.run import Harness
from opengyre.proto.task import Check, GroupScored, TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Started, Verified, VersionSpan
from opengyre.rollout.history import History
from opengyre.rollout.journal import Journal
from opengyre.shared.blobs import MESSAGE_LIMIT, Blobs
from opengyre.shared.bulk import fill, pack
from opengyre.shared.bus import Bus, call, consume, pulling, read
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import CacheSettings, Settings
from opengyre.shared.waits import Waits
from opengyre.trajectory.service import Trajectory
from support import eventually

GROUP = "r-g000001"
MEMBERS = (f"{GROUP}-e00", f"{GROUP}-e01")
IDS = 1_200_000
VOCABULARY = 1_000_000
TASK = TaskSpec(task="t1", instruction="x", checks=(Check(name="a", command="true", weight=1),))


def dispatch(execution: str) -> EpisodeDispatch:
    return EpisodeDispatch(
        run="r", group=GROUP, execution=execution, members=MEMBERS, version=1, seed=1, task=TASK, harness=Harness(),
        min_members=2,
    )  # fmt: skip


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks whether it is to stop after each wait for a message."""
    monkeypatch.setattr(consume, "FETCH_S", 0.5)


@contextlib.asynccontextmanager
async def service(bus: Bus, blobs: Blobs, tmp_path: Path) -> AsyncIterator[None]:
    context = Context(
        "trajectory", "x0", Settings.model_validate({"state_dir": tmp_path / "state"}), bus, blobs, "http://nowhere"
    )
    running = asyncio.create_task(Trajectory(context).run())
    try:
        yield
    finally:
        context.stopping.set()
        await asyncio.wait([running], timeout=60)
    running.result()


async def written(bus: Bus, blobs: Blobs, execution: str, score: float, prompt: tuple[int, ...]) -> list[Call]:
    """An execution of two calls, as its writer appends it; the second goes on from the whole of the first."""
    journal = Journal(bus, Waits(), dispatch(execution), blobs)
    assert await journal.load() == []
    await journal.begin("x", VOCABULARY)
    calls: list[Call] = []
    for turn, new in enumerate((prompt, (5, 6))):
        before = calls[-1] if calls else None
        length = 0 if before is None else len(prompt) + 3
        event = await journal.append(
            Call, call=f"c{turn}", turn=turn, request_digest=f"d{turn}", parent=before and before.call,
            prefix_tokens=length, prompt_ids=new, sampled_ids=(7, 8, 9), logprobs=(-0.5,) * 3, temperature=1.0,
            versions=(VersionSpan(version=1, start=0, end=3),), finish_reason="stop", text="x", hosts=("h",),
            history_digest=f"h{turn}",
        )  # fmt: skip
        assert isinstance(event, Call)
        calls.append(event)
    await journal.append(Verified, parts=(Part(name="a", weight=1, value=score),))
    await journal.append(Ended, reason="done", turns=2, sampled_tokens=6, duration_s=1.0, members=MEMBERS)
    return calls


async def made(bus: Bus) -> GroupReady:
    async def scored() -> bool:
        found = await read(bus, subjects.TASKS, subjects.task("r", "*", "scored"))
        return any(isinstance(one.event(), GroupScored) for one in found)

    await eventually(scored, 90)
    async with pulling(bus, *subjects.TRAINER_GROUPS) as puller:
        delivery = await puller.take(60)
        assert delivery is not None
        ready = await delivery.event()
        await delivery.ack()
    assert isinstance(ready, GroupReady)
    return ready


async def members_of(blobs: Blobs, ready: GroupReady) -> tuple[Member, ...]:
    if ready.blob is None:
        return ready.members
    return msgspec.json.decode(await blobs.get(ready.blob), type=tuple[Member, ...])


def long_prompt() -> tuple[int, ...]:
    return tuple(random.Random(1).choices(range(100_000, VOCABULARY), k=IDS))


async def test_a_call_of_more_than_a_million_new_ids_ends_in_a_group(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    """Its JSON would be more than a message may have. Everything that reads logs has its ids."""
    prompt = long_prompt()
    async with service(bus, blobs, tmp_path):
        calls = await written(bus, blobs, MEMBERS[0], 1.0, prompt)
        await written(bus, blobs, MEMBERS[1], 0.0, (1, 2))
        ready = await made(bus)
        report = await call(
            bus, "trajectory", "any", "explain", ExplainRequest(execution=MEMBERS[0]), ExplainReport, timeout_s=60
        )
    assert len(codec.encode(calls[0])) > 8 << 20
    assert calls[0].prompt_ids == prompt, "who appends has the ids"
    stored = await read(bus, subjects.TRAJ, subjects.traj("r", GROUP, MEMBERS[0], "call"))
    assert [len(message.payload) < 2048 for message in stored] == [True, True]
    first = stored[0].event()
    assert isinstance(first, Call)
    assert first.bulk is not None
    assert (first.bulk.prompt_ids, first.bulk.sampled_ids, first.prompt_ids) == (IDS, 3, ())

    member = (await members_of(blobs, ready))[0]
    (sequence,) = member.sequences
    assert ready.refused == {}
    assert sequence.tokens == (*prompt, 7, 8, 9, 5, 6, 7, 8, 9)
    assert (member.trained_tokens, member.advantage) == (6, 1.0)
    gradient.check(sequence)
    assert (report.trained_tokens, report.unique_nodes) == (6, IDS + 8)

    again = Journal(bus, Waits(), dispatch(MEMBERS[0]), blobs)
    log = await again.load()
    assert [event for event in log if isinstance(event, Call)] == calls
    assert len(History.of(log).tokens(calls[1])) == IDS + 8

    everything = await read(bus, subjects.TRAJ, subjects.traj("r", GROUP, "*", "*"))
    replayed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "opengyre.trajectory.replay"], capture_output=True, check=True,
        input=b"\n".join(message.payload for message in everything), timeout=240, cwd=tmp_path,
        env={**os.environ, "GYRE_STATE_DIR": str(tmp_path / "state")},
    )  # fmt: skip
    group = codec.decode(replayed.stdout.strip())
    assert isinstance(group, GroupReady)
    assert ready.blob is not None
    assert msgspec.json.encode(group.members) == await blobs.get(ready.blob), "byte for byte"


async def test_a_blob_that_is_missing_is_a_refused_call_and_stops_nothing(
    bus: Bus, blobs: Blobs, tmp_path: Path
) -> None:
    prompt = long_prompt()[:40_000]
    calls = await written(bus, blobs, MEMBERS[0], 1.0, prompt)
    packed = await pack(blobs, calls[0])
    assert packed.bulk is not None
    blobs.path(packed.bulk.blob).unlink()
    async with service(bus, blobs, tmp_path):
        await written(bus, blobs, MEMBERS[1], 0.0, (1, 2))
        ready = await made(bus)
        report = await call(
            bus, "trajectory", "any", "explain", ExplainRequest(execution=MEMBERS[0]), ExplainReport, timeout_s=60
        )
    assert ready.refused == {"blob_missing": 1, "parent_missing": 1}
    assert [member.trained_tokens for member in await members_of(blobs, ready)] == [0, 6]
    assert {one.call: one.reason for one in report.per_call} == {"c0": "blob_missing", "c1": "parent_missing"}
    dead = [event for one in await read(bus, subjects.DLQ, ">") if isinstance(event := one.event(), DeadLetter)]
    assert [letter.error for letter in dead] == ["call c0 cannot be trained: blob_missing"]
    log = await Journal(bus, Waits(), dispatch(MEMBERS[0]), blobs).load()
    digests = [event.history_digest for event in log if isinstance(event, Call)]
    assert digests == ["", ""], "a writer that takes over builds no prompt on ids that are gone"
    assert any(isinstance(event, Started) for event in log)


async def test_what_is_packed_and_filled_is_the_same_and_what_is_small_stays(blobs: Blobs) -> None:
    small = Call(
        run="r", group=GROUP, execution=MEMBERS[0], index=1, attempt=0, call="c", turn=0, request_digest="d",
        parent=None, prefix_tokens=0, prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.25,), temperature=1.0,
        versions=(VersionSpan(version=1, start=0, end=1),), finish_reason="stop", text="x", hosts=("h",),
    )  # fmt: skip
    assert await pack(blobs, small) is small
    sampled = tuple(random.Random(2).choices(range(VOCABULARY), k=30_000))
    large = msgspec.structs.replace(small, sampled_ids=sampled, logprobs=tuple(-n / 7 for n in range(30_000)))
    packed = await pack(blobs, large)
    assert len(codec.encode(packed)) < 2048 < MESSAGE_LIMIT < len(codec.encode(large))
    assert await fill(blobs.get, [small, packed]) == [small, large]
    assert packed.bulk is not None
    blobs.path(packed.bulk.blob).write_bytes(b"damaged")
    assert await fill(blobs.get, [packed]) == [packed]


async def test_a_file_of_the_stream_and_an_export_have_the_ids_of_blobs(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    prompt = long_prompt()[:40_000]
    await written(bus, blobs, MEMBERS[0], 1.0, prompt)
    stored = await read(bus, subjects.TRAJ, subjects.traj("r", GROUP, MEMBERS[0], "*"))
    file = tmp_path / "traj.jsonl"
    file.write_bytes(b"\n".join(message.payload for message in stored))
    found = read_tree(open_log(file, tmp_path / "state" / "blobs"), Forest())
    assert (found.format, found.unique_nodes, found.events, found.refused.count) == ("gyre", 40_008, 6, 0)
    without = read_tree(open_log(file, tmp_path / "nowhere"), Forest())
    assert without.refused.reasons == {"blob_missing": 1, "parent_missing": 1}

    out = tmp_path / "calls.parquet"
    assert await export(bus, blobs, MEMBERS[0], None, out, WRITERS["parquet"]) == (1, 2)
    rows = parquet.read_table(out).to_pylist()
    assert [len(row["prompt_ids"]) for row in rows] == [40_000, 2]
    assert tuple(rows[0]["prompt_ids"]) == prompt
