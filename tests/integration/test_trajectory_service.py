"""The trajectory service against a real broker: each group once, whatever is killed, repeated or too large."""

import asyncio
import contextlib
import io
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from opengyre.cli.stream_lines import record as as_record
from opengyre.proto import codec, subjects
from opengyre.proto.base import tag_of
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.run import Harness
from opengyre.proto.task import Check, GroupScored, TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Started, TrajEvent, Verified, VersionSpan
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus, TooLargeError, consume, pulling, read
from opengyre.shared.bus.topology import consumers
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import CacheSettings, Settings
from opengyre.trajectory.replay import replay_groups, run
from opengyre.trajectory.service import Trajectory
from support import eventually

RUN = "r"


def logs(number: int, *values: float, tokens: int = 3, purpose: str = "train") -> list[list[TrajEvent]]:
    """The logs of a group, one an execution."""
    group = f"{RUN}-g{number:06d}"
    members = tuple(f"{group}-e{member:02d}" for member in range(len(values)))
    task = TaskSpec(task=f"t{number}", instruction="x", checks=(Check(name="a", command="true", weight=1),))
    task = msgspec.structs.replace(task, purpose=purpose)
    found: list[list[TrajEvent]] = []
    for name, value in zip(members, values, strict=True):
        dispatch = EpisodeDispatch(
            run=RUN, group=group, execution=name, members=members, version=1, seed=1, task=task, harness=Harness(),
            min_members=2,
        )  # fmt: skip
        ids = {"run": RUN, "group": group, "execution": name, "attempt": 0}
        call = Call(
            **ids, index=1, call="c", turn=0, request_digest="d", parent=None, prefix_tokens=0, prompt_ids=(1, 2),
            sampled_ids=(3,) * tokens, logprobs=(-0.5,) * tokens, temperature=1.0, finish_reason="stop", text="x",
            versions=(VersionSpan(version=1, start=0, end=tokens),), hosts=("h",),
        )  # fmt: skip
        found.append([
            Started(**ids, index=0, dispatch=dispatch, replica="x"),
            call,
            Verified(**ids, index=2, parts=(Part(name="a", weight=1, value=value),)),
            Ended(**ids, index=3, reason="done", turns=1, sampled_tokens=tokens, duration_s=1, members=members),
        ])  # fmt: skip
    return found


async def record(bus: Bus, *events: TrajEvent) -> None:
    for event in events:
        name = tag_of(event).split(".")[1]
        await bus.publish(subjects.traj(event.run, event.group, event.execution, name), event)


async def ready(bus: Bus) -> list[GroupReady]:
    """What is in the work queue; it is taken out."""
    found: list[GroupReady] = []
    async with pulling(bus, *subjects.TRAINER_GROUPS) as puller, asyncio.timeout(90):
        while True:
            delivery = await puller.take(0.5)
            if delivery is not None:
                event = await delivery.event()
                assert isinstance(event, GroupReady)
                found.append(event)
                await delivery.ack()
            elif (await bus.stream_info(subjects.GROUPS)).state.messages == 0:
                return found


async def scored(bus: Bus) -> list[GroupScored]:
    found = await read(bus, subjects.TASKS, subjects.task(RUN, "*", "scored"))
    return [e for s in found if isinstance(e := s.event(), GroupScored)]


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks whether it is to stop after each wait for a message."""
    monkeypatch.setattr(consume, "FETCH_S", 0.5)


@contextlib.asynccontextmanager
async def service(bus: Bus, blobs: Blobs, tmp_path: Path) -> AsyncIterator[Context]:
    settings = Settings.model_validate({"state_dir": tmp_path / "state"})
    context = Context("trajectory", "x0", settings, bus, blobs, "http://nowhere")
    running = asyncio.create_task(Trajectory(context).run())
    try:
        yield context
    finally:
        context.stopping.set()
        await asyncio.wait([running], timeout=60)
    running.result()


async def test_a_group_is_made_when_its_last_member_ends(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    async with service(bus, blobs, tmp_path) as context:
        first, second = logs(1, 1.0, 0.0)
        await record(bus, *first, *second[:-1])
        await record(bus, *(event for log in logs(2, 1.0, purpose="evaluate") for event in log))

        async def one() -> bool:
            return len(await scored(bus)) == 1

        await eventually(one, 90)
        assert [event.outcome for event in await scored(bus)] == ["evaluated"]
        await record(bus, second[-1])

        async def two() -> bool:
            return len(await scored(bus)) == 2

        await eventually(two, 90)
        assert context.gauges["groups_scored"] == 2
    made = await ready(bus)
    assert made == replay_groups([*first, *second])
    assert [member.advantage for member in made[0].members] == [1, -1]


async def test_members_that_are_too_large_travel_as_a_blob(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    events = [event for log in logs(1, 1.0, 0.0, tokens=30_000) for event in log]
    async with service(bus, blobs, tmp_path):
        await record(bus, *events)

        async def one() -> bool:
            return len(await scored(bus)) == 1

        await eventually(one, 90)
    (made,) = await ready(bus)
    assert made.members == ()
    assert made.blob is not None
    members = msgspec.json.decode(await blobs.get(made.blob), type=tuple[Member, ...])
    assert members == replay_groups(events)[0].members


async def test_what_is_no_event_becomes_a_dead_letter_and_stops_nothing(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    await bus.publish_raw(subjects.traj(RUN, f"{RUN}-g1", "x", "ended"), b"{garbage", "x", "traj.ended.v1")
    async with service(bus, blobs, tmp_path):
        await record(bus, *(event for log in logs(1, 1.0, 0.0) for event in log))

        async def both() -> bool:
            return len(await scored(bus)) == 1 and len(await read(bus, subjects.DLQ, ">")) == 1

        await eventually(both, 90)


async def test_malformed_events_become_dead_letters_and_stop_nothing(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    """Of one group: a call without its ids, one with a log-prob too few, one with ids that are no ids, an empty one,
    megabytes of garbage, and an id that the policy does not have. Its good members train, and so does what comes after.
    What is larger than a message may be does not get there."""
    parts = logs(1, *(n / 7 for n in range(8)))
    calls = [log[1] for log in parts]
    assert all(isinstance(call, Call) for call in calls)
    document = msgspec.to_builtins(calls[0])
    del document["sampled_ids"]
    parts[1][1] = msgspec.structs.replace(calls[1], logprobs=(-0.5,))
    parts[2][1] = msgspec.structs.replace(calls[2], sampled_ids=(3, -7, 2**40))
    parts[3][1] = msgspec.structs.replace(calls[3], sampled_ids=(), logprobs=(), versions=())
    parts[7][1] = msgspec.structs.replace(calls[7], sampled_ids=(3, 999, 1000))
    parts = [[msgspec.structs.replace(log[0], vocabulary=1000), *log[1:]] for log in parts]
    with pytest.raises(TooLargeError, match="store a blob"):
        await bus.publish_raw(
            subjects.traj(RUN, f"{RUN}-g000001", "x", "call"), b"\xff{" * (5 << 20), "x", "traj.call.v1"
        )
    raw = {0: msgspec.json.encode(document), 4: b"\xff{" * (3 << 20)}
    async with service(bus, blobs, tmp_path):
        for number, log in enumerate(parts):
            await record(bus, log[0])
            if number in raw:
                subject = subjects.traj(RUN, f"{RUN}-g000001", log[0].execution, "call")
                await bus.publish_raw(subject, raw[number], f"x{number}", "traj.call.v1")
            else:
                await record(bus, log[1])
            await record(bus, *log[2:])
        await record(bus, *(event for log in logs(2, 1.0, 0.0) for event in log))

        async def both() -> bool:
            return len(await scored(bus)) == 2

        await eventually(both, 90)
    dead = [e for s in await read(bus, subjects.DLQ, ">") if isinstance(e := s.event(), DeadLetter)]
    reasons = {letter.origin_subject.split(".")[5][-3:]: letter.error for letter in dead}
    assert sorted(reasons) == ["e00", "e01", "e02", "e03", "e04", "e07"]
    assert "sampled_ids" in reasons["e00"]
    assert [reasons[f"e{n:02d}"].split(": ")[-1] for n in (1, 2, 3, 7)] == [
        "logprobs_length", "token_id", "empty_completion", "token_id",
    ]  # fmt: skip
    assert all(len(letter.payload) <= 256 << 10 for letter in dead)
    first, _ = sorted(await ready(bus), key=lambda group: group.group)
    trained = {member.execution[-3:]: member.trained_tokens for member in first.members}
    assert trained == {"e01": 0, "e02": 0, "e03": 0, "e05": 3, "e06": 3, "e07": 0}
    assert first.refused == {"empty_completion": 1, "logprobs_length": 1, "token_id": 2}


async def letters(bus: Bus) -> dict[int, str]:
    """Sequence in TRAJ -> why it is a dead letter."""
    dead = [e for s in await read(bus, subjects.DLQ, ">") if isinstance(e := s.event(), DeadLetter)]
    return {letter.origin_sequence: letter.error for letter in dead}


async def test_a_replay_of_a_spoilt_log_gives_the_bytes_that_went_to_the_trainer(
    bus: Bus, blobs: Blobs, tmp_path: Path
) -> None:
    """A call without its ids, garbage, and an event whose ids contradict its subject: also in a log of no member."""
    first, second, third = logs(1, 1.0, 0.0, 0.5)
    stray = logs(2, 1.0, 0.0)[0][1]
    document = msgspec.to_builtins(third[1])
    del document["sampled_ids"]
    async with service(bus, blobs, tmp_path):
        await record(bus, *first, *third[:1])
        subject = subjects.traj(RUN, third[0].group, third[0].execution, "call")
        without = await bus.publish_raw(subject, msgspec.json.encode(document), "x1", "traj.call.v1")
        garbage = await bus.publish_raw(subject, b"{garbage\n\xff", "x2", "traj.call.v1")
        contrary = await bus.publish_raw(
            subjects.traj(RUN, third[0].group, "nobody", "call"), codec.encode(stray), "x3", "traj.call.v1"
        )
        await record(bus, *third[2:], *second)

        async def one() -> bool:
            return len(await scored(bus)) == 1

        await eventually(one, 90)
    told = await letters(bus)
    assert told.keys() == {without, garbage, contrary}
    assert "contradict its subject" in told[contrary]
    out, complaints = io.BytesIO(), list[str]()
    lines = [
        msgspec.json.encode(as_record(subjects.TRAJ, stored))
        for stored in await read(bus, subjects.TRAJ, subjects.traj(RUN, "*", "*", "*"))
    ]
    assert await run(io.BytesIO(b"\n".join(lines)), out, blobs.get, complaints.append) == 1
    assert len(complaints) == 3
    (made,) = await ready(bus)
    assert {member.execution for member in made.members} == {first[0].execution, second[0].execution}
    assert out.getvalue() == codec.encode(made) + b"\n"


async def test_garbage_of_a_group_without_a_start_becomes_dead_letters(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    first, second = logs(1, 1.0, 0.0)
    subject = subjects.traj(RUN, first[0].group, first[0].execution, "call")
    async with service(bus, blobs, tmp_path):
        garbage = await bus.publish_raw(subject, b"{garbage", "x1", "traj.call.v1")
        contrary = await bus.publish_raw(subject, codec.encode(second[1]), "x2", "traj.call.v1")
        await record(bus, *first[2:])
        wrong = await bus.publish_raw(
            subjects.traj(RUN, first[0].group, second[0].execution, "ended"), codec.encode(logs(2, 1.0, 0.0)[1][3]),
            "x3", "traj.ended.v1",
        )  # fmt: skip

        async def told() -> bool:
            return {garbage, contrary, wrong} <= (await letters(bus)).keys()

        await eventually(told, 90)
        why = await letters(bus)
    assert "contradict its subject" in why[contrary]
    assert "contradict its subject" in why[wrong]
    assert any("not complete" in reason for reason in why.values())


async def test_kill_9_at_any_time_makes_each_group_once(bus: Bus, nats_server, tmp_path: Path) -> None:
    """Two replicas share the work; one after the other is killed while groups end."""
    groups, rng = 60, random.Random(3)
    # What a killed process held comes back after this.
    config = next(config for stream, config in consumers() if stream == subjects.TRAJ)
    await bus.js.add_consumer(subjects.TRAJ, config.evolve(ack_wait=2))
    environment = {**os.environ, "GYRE_BUS__URL": nats_server.url, "GYRE_STATE_DIR": str(tmp_path / "state")}

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "trajectory.log").open("ab") as out:
            command = [sys.executable, "-m", "opengyre.trajectory"]
            return subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=out, stderr=out)

    replicas = [start(), start()]
    everything: list[TrajEvent] = []
    try:
        for number in range(groups):
            parts = logs(number, *(rng.random() for _ in range(3)))
            await asyncio.gather(*(record(bus, *log) for log in parts))
            everything += [event for log in parts for event in log]
            if number % 20 == 10:

                async def working(number: int = number) -> bool:
                    return len(await scored(bus)) > number // 2

                await eventually(working, 60)
                victim = replicas.pop(0)
                victim.kill()
                victim.wait(60)
                replicas.append(start())

        async def all_scored() -> bool:
            return len({event.group for event in await scored(bus)}) == groups

        await eventually(all_scored, 120, 0.1)
    finally:
        for replica in replicas:
            replica.terminate()
        for replica in replicas:
            replica.wait(60)
    made = await ready(bus)
    assert sorted(group.group for group in made) == sorted({group.group for group in made}), "each once"
    assert sorted(made, key=lambda group: group.group) == replay_groups(everything)
    assert len(await scored(bus)) == groups
