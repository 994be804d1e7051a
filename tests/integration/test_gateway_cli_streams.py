"""The verbs of `gyre` on streams, against a gateway and a NATS server that really run."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from opengyre.cli import stream_read
from opengyre.gateway import examples
from opengyre.proto import codec, subjects
from opengyre.proto.decision import Decision
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.task import TaskSpec, TaskSubmitted
from opengyre.proto.update import RunFinished
from opengyre.shared.bus import Bus, read
from support.gateway_cli import Gyre, gyre_on
from support.gateway_fakes import log_of


@pytest.fixture
async def gyre(bus: Bus, tmp_path: Path) -> AsyncIterator[Gyre]:
    async with gyre_on(bus, tmp_path) as made:
        yield made


async def publish_tasks(bus: Bus, run: str, many: int) -> None:
    for number in range(many):
        spec = TaskSpec(task=f"t{number}", instruction="x")
        event = TaskSubmitted(run=run, task=spec.task, spec=spec)
        await bus.publish(subjects.task(run, spec.task, "submitted"), event)


async def test_streams_are_listed_and_viewed(gyre: Gyre, bus: Bus) -> None:
    await publish_tasks(bus, "demo", 5)
    await publish_tasks(bus, "other", 2)
    facts = {row["stream"]: row for row in await gyre.json("stream", "ls")}
    assert facts["TASKS"]["messages"] == 7
    assert "TASKS" in await gyre.shown("stream", "ls")
    rows = await gyre.lines("stream", "view", "tasks", "--run", "other")
    assert [(row["sequence"], row["event"]["run"]) for row in rows] == [(6, "other"), (7, "other")]
    rows = await gyre.lines("stream", "view", "TASKS", "--start", "3", "--limit", "2")
    assert [row["sequence"] for row in rows] == [3, 4]
    assert len(await gyre.lines("stream", "view", "TASKS", "--since", "1h")) == 7
    assert await gyre.lines("stream", "view", "TASKS", "--since", "2100-01-01") == []
    assert (await gyre.run("stream", "view", "TASKS", "--run", "nope")).stderr == "no message of TASKS matches\n"
    text = await gyre.shown("stream", "view", "TASKS", "--limit", "1")
    assert "task.demo.t0.submitted task.submitted.v1" in text
    assert "there is no stream NOPE; there are" in await gyre.refused("stream", "view", "NOPE")


async def test_a_work_queue_is_looked_at_without_taking_from_it(gyre: Gyre, bus: Bus) -> None:
    for number in range(3):
        await bus.publish_raw(subjects.episode_dispatch("demo"), b'{"type":"x","group":"g"}', f"m{number}", "x")
    assert [row["sequence"] for row in await gyre.lines("stream", "view", "EPISODES")] == [1, 2, 3]
    assert await gyre.lines("stream", "view", "EPISODES", "--since", "2100-01-01") == []
    assert (await bus.stream_info(subjects.EPISODES)).state.messages == 3


@pytest.mark.parametrize("stream", ["TASKS", "EPISODES"])
async def test_tail_shows_what_comes(gyre: Gyre, bus: Bus, stream: str) -> None:
    subject = {"TASKS": "gyre.v1.task.demo.x.y", "EPISODES": subjects.episode_dispatch("demo")}[stream]
    await bus.publish_raw(subject, b"{}", "before", "x")
    tail = asyncio.create_task(gyre.lines("stream", "tail", stream, "--limit", "1"))
    number = 0
    while not tail.done():  # a tail that is not there yet shows nothing of what came before it
        number += 1
        await bus.publish_raw(subject, msgspec.json.encode({"number": number}), f"m{number}", "x")
        await asyncio.wait([tail], timeout=0.2)
    (row,) = await tail
    assert row["event"]["number"] >= 1


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob(".tasks*"))


async def test_a_replay_into_a_file_holds_every_message_as_it_was(gyre: Gyre, bus: Bus, tmp_path: Path) -> None:
    await publish_tasks(bus, "demo", 600)
    out = tmp_path / "tasks.jsonl"
    result = await gyre.run("stream", "replay", "TASKS", "--run", "demo", "--out", str(out))
    assert result.exit_code == 0
    assert "600 messages of TASKS were replayed" in result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    stored = await read(bus, subjects.TASKS, "gyre.v1.task.>")
    assert [row["event"] for row in rows] == [msgspec.json.decode(message.payload) for message in stored]
    assert not temporary(tmp_path), "no temporary file stays"
    assert "cannot be written" in await gyre.refused("stream", "replay", "TASKS", "--out", str(tmp_path / "no" / "x"))


async def test_a_replay_into_a_fresh_processor_gives_the_same_groups_each_time(gyre: Gyre, bus: Bus) -> None:
    members = ("demo-g000000-e00", "demo-g000000-e01")
    for number, name in enumerate(members):
        for subject, event in log_of(name, members, msgspec.convert(examples.TASK_IN, TaskSpec), float(number)):
            await bus.publish(subject, event)
    words = ("stream", "replay", "TRAJ", "--run", "demo", "--into", "processor")
    first, second = await gyre.shown(*words), await gyre.shown(*words)
    assert first == second
    groups = [codec.decode(line.encode()) for line in first.splitlines()]
    assert [group.group for group in groups] == ["demo-g000000"]  # type: ignore[attr-defined]  # the stream holds this kind only

    # An event that is malformed is told of and ends nothing.
    await bus.publish_raw(subjects.traj("demo", "demo-g000000", "x", "call"), b"{\n" + b"\xff", "x", "traj.call.v1")
    result = await gyre.run(*words)
    assert (result.exit_code, result.stdout) == (0, first)
    assert (
        "replay: event 11 on gyre.v1.traj.demo.demo-g000000.x.call is passed over: Expected `object`" in result.stderr
    )


async def test_options_that_mean_nothing_are_refused(gyre: Gyre, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "one of the two" in await gyre.refused("stream", "replay", "--original", "--speed", "2")
    assert "one of the two" in await gyre.refused("stream", "replay", "--out", "x", "--into", "processor")
    assert "reads the stream TRAJ, not TASKS" in await gyre.refused("stream", "replay", "TASKS", "--into", "processor")
    monkeypatch.setattr(stream_read, "CONNECT_S", 0.5)
    assert "does not answer" in await gyre.refused("stream", "ls", "--nats", "nats://127.0.0.1:9")


def letter(number: int, payload: str) -> DeadLetter:
    return DeadLetter(
        origin_stream="UPDATES", consumer="c", origin_subject=subjects.update("demo", "finished"),
        origin_sequence=1000 + number, deliveries=5, error="[failed]", payload=payload,
    )  # fmt: skip


async def test_dead_letters_are_listed_shown_sent_again_and_dropped(gyre: Gyre, bus: Bus) -> None:
    good = codec.encode(RunFinished(run="demo", update=1, version=1)).decode()
    for number, payload in enumerate((good, "no event", good)):
        await bus.publish(subjects.dlq("UPDATES", "c"), letter(number, payload))
    assert [one["sequence"] for one in await gyre.json("stream", "dlq", "ls")] == [1, 2, 3]
    assert await gyre.json("stream", "dlq", "ls", "--stream", "TRAJ") == []
    assert "[failed]" in await gyre.shown("stream", "dlq", "ls")
    assert "payload: no event" in await gyre.shown("stream", "dlq", "show", "2")
    assert (await gyre.json("stream", "dlq", "requeue", "1"))["sequence"] == 1
    (stored,) = await read(bus, subjects.UPDATES, "gyre.v1.update.>")
    assert stored.event() == RunFinished(run="demo", update=1, version=1)
    assert "there is no dead letter 1" in await gyre.refused("stream", "dlq", "requeue", "1")
    assert "cannot be sent again" in await gyre.refused("stream", "dlq", "requeue", "2")
    assert (await gyre.json("stream", "dlq", "drop", "2"))["dropped"] is True
    assert [one["sequence"] for one in await gyre.json("stream", "dlq", "ls")] == [3]


async def test_a_selection_by_group_looks_into_the_payload(gyre: Gyre, bus: Bus) -> None:
    for number, admitted in enumerate((("demo-g000000",), ("demo-g000001",))):
        event = Decision(run="demo", decision=f"1-{number}", kind="admission", admitted=admitted)
        await bus.publish(subjects.decision("demo"), event)
    assert len(await gyre.lines("stream", "view", "DECISIONS", "--run", "demo")) == 2
    assert await gyre.lines("stream", "view", "DECISIONS", "--group", "demo-g000000") == []
