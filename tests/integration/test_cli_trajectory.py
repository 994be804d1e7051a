"""`gyre trajectory`: trees of files, an execution opened again through the gateway, and exports that read back."""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from atif import Trajectory as AtifDocument
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.cli.trajectory import tree
from opengyre.proto import subjects
from opengyre.proto.base import tag_of
from opengyre.proto.decision import GroupEntry
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, TrajEvent, VersionSpan
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, consume
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import Settings
from opengyre.trajectory.service import Trajectory
from support import eventually
from support.gateway_cli import Gyre, gyre_on
from support.gateway_fakes import log_of
from support.trajectory_logs import FIXTURES

TASK = TaskSpec(task="t", instruction="write it", checks=(Check(name="a", command="true", weight=1.0),))
MEMBERS = ("demo-g000001-e00", "demo-g000001-e01")


@pytest.fixture
async def gyre(bus: Bus, tmp_path: Path) -> AsyncIterator[Gyre]:
    async with gyre_on(bus, tmp_path) as made:
        yield made


@pytest.fixture
async def recorded(bus: Bus) -> dict[str, list[TrajEvent]]:
    """A group whose first member made a second call, of another branch."""
    logs: dict[str, list[TrajEvent]] = {}
    for number, name in enumerate(MEMBERS):
        events = [event for _, event in log_of(name, MEMBERS, TASK, value=float(number == 0))]
        assert all(isinstance(event, TrajEvent) for event in events)
        logs[name] = [event for event in events if isinstance(event, TrajEvent)]
    first = logs[MEMBERS[0]]
    second = msgspec.structs.replace(
        next(event for event in first if isinstance(event, Call)), index=4, call="c1", turn=1, parent="c0",
        prefix_tokens=5, prompt_ids=(6, 7), sampled_ids=(8,), logprobs=(-0.25,), text="done",
        versions=(VersionSpan(version=0, start=0, end=1),),
    )  # fmt: skip
    logs[MEMBERS[0]] = [*first[:3], msgspec.structs.replace(second, index=3),
                        *(msgspec.structs.replace(event, index=event.index + 1) for event in first[3:])]  # fmt: skip
    for events in logs.values():
        for event in events:
            kind = tag_of(event).split(".")[1]
            await bus.publish(subjects.traj(event.run, event.group, event.execution, kind), event)
    entry = GroupEntry(
        run="demo", group="demo-g000001", task="t", sequence=1, purpose="train", state="trained", executions=MEMBERS,
        admitted_version=2, trained=dict.fromkeys(MEMBERS, 5),
    )  # fmt: skip
    await Bucket(bus, subjects.KV_LEDGER, GroupEntry).create(entry.group, entry)
    return logs


@contextlib.asynccontextmanager
async def trajectory_on(bus: Bus, folder: Path) -> AsyncIterator[None]:
    settings = Settings.model_validate({"state_dir": folder / "state"})
    async with Blobs(folder / "blobs", settings.cache) as blobs:
        context = Context("trajectory", "x0", settings, bus, blobs, "http://nowhere")
        running = asyncio.create_task(Trajectory(context).run())
        try:
            await eventually(lambda: context.missing is None)
            yield
        finally:
            context.stopping.set()
            await asyncio.wait([running], timeout=60)
        running.result()


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks whether it is to stop after each wait for a message."""
    monkeypatch.setattr(consume, "FETCH_S", 0.5)


async def test_an_execution_is_opened_again(
    gyre: Gyre, bus: Bus, recorded: dict[str, list[TrajEvent]], tmp_path: Path
) -> None:
    async with trajectory_on(bus, tmp_path):
        report = await gyre.json("trajectory", "show", MEMBERS[0])
        assert (report["trained_version"], report["staleness"]) == (5, 3)
        tree = report["tree"]
        assert (tree["calls"], tree["trained_tokens"], tree["leaves"]) == (2, 3, 1)
        assert tree["advantage"] > 0
        assert [one["outcome"] for one in tree["per_call"]] == ["trained", "trained"]
        shown = await gyre.shown("trajectory", "show", MEMBERS[0])
        assert "trained at version 5 with staleness 3" in shown
        assert "path 0" in shown
        sentence = await gyre.refused("trajectory", "show", "demo-g000009-e00")
        assert "there is nothing of execution demo-g000009-e00" in sentence


async def test_show_says_who_does_not_answer(
    gyre: Gyre, recorded: dict[str, list[TrajEvent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opengyre.gateway.executions.PATIENCE_S", 0.2)
    assert "trajectory does not answer" in await gyre.refused("trajectory", "show", MEMBERS[0])


async def test_atif_of_a_run_reads_back(gyre: Gyre, recorded: dict[str, list[TrajEvent]], tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    facts = await gyre.json("trajectory", "export", "--run", "demo", "--out", str(out))
    assert (facts["executions"], facts["calls"]) == (2, 3)
    documents = [AtifDocument.model_validate_json(line) for line in out.read_text().splitlines()]
    assert [document.trajectory_id for document in documents] == list(MEMBERS)
    first = documents[0]
    assert [step.source for step in first.steps] == ["user", "agent", "agent"]
    assert first.steps[0].message == "write it"
    assert first.steps[1].tool_calls is not None
    assert first.steps[1].tool_calls[0].arguments == {"command": "echo hello"}
    assert first.steps[2].metrics is not None
    assert first.steps[2].metrics.prompt_token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert first.extra is not None
    assert (first.extra["verified_score"], first.extra["end_reason"]) == (1.0, "done")
    back = await gyre.plain("trajectory", "tree", str(out))
    assert (back["format"], back["unit"], back["executions"]) == ("atif", "tokens", 2)
    assert (back["events"], back["path_tokens"], back["unique_nodes"]) == (5, 5 + 8 + 5, 8)


async def test_atif_of_one_execution_is_a_document(
    gyre: Gyre, recorded: dict[str, list[TrajEvent]], tmp_path: Path
) -> None:
    out = tmp_path / "one.json"
    await gyre.shown("trajectory", "export", MEMBERS[1], "--out", str(out))
    assert AtifDocument.model_validate_json(out.read_text()).trajectory_id == MEMBERS[1]


async def test_parquet_has_every_token(gyre: Gyre, recorded: dict[str, list[TrajEvent]], tmp_path: Path) -> None:
    out = tmp_path / "run.parquet"
    await gyre.shown("trajectory", "export", "--run", "demo", "--format", "parquet", "--out", str(out))
    rows = parquet.read_table(out).to_pylist()
    calls = [event for log in recorded.values() for event in log if isinstance(event, Call)]
    assert [(row["execution"], row["call"]) for row in rows] == [(call.execution, call.call) for call in calls]
    for row, call in zip(rows, calls, strict=True):
        assert tuple(row["prompt_ids"]) == call.prompt_ids
        assert tuple(row["sampled_ids"]) == call.sampled_ids
        assert tuple(row["logprobs"]) == call.logprobs
        assert row["parent"] == call.parent
        assert row["versions"] == [0] * len(call.sampled_ids)
    assert {row["verified_score"] for row in rows} == {0.0, 1.0}


async def test_our_own_stream_is_a_format(gyre: Gyre, recorded: dict[str, list[TrajEvent]], tmp_path: Path) -> None:
    out = tmp_path / "traj.jsonl"
    await gyre.run("stream", "replay", "TRAJ", "--run", "demo", "--out", str(out))
    found = await gyre.plain("trajectory", "tree", str(out), "--calls")
    assert (found["format"], found["unit"], found["executions"], found["calls"]) == ("gyre", "tokens", 2, 3)
    assert (found["events"], found["unique_nodes"], found["leaves"]) == (5, 8, 2)
    assert [row["transition"] for row in found["per_call"]] == ["root", "extend", "root"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("export", "--out", "x"), "an execution or --run is needed"),
        (("export", MEMBERS[0], "--run", "demo", "--out", "x"), "allowed is one of the two"),
        (("export", "--run", "a-b", "--out", "x"), "run 'a-b' is not allowed"),
        (("export", "--run", "nobody", "--out", "x"), "there is nothing of run nobody"),
        (("export", "--run", "demo", "--out", "."), "--out is '.'"),
    ],
)
async def test_what_cannot_be_exported_is_a_sentence(gyre: Gyre, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in await gyre.refused("trajectory", *arguments)


def test_an_export_says_that_its_out_is_required() -> None:
    result = CliRunner().invoke(app, ["trajectory", "export", "--run", "demo"], env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert "Missing option '--out'" in result.output
    shown = CliRunner().invoke(app, ["trajectory", "export", "--help"], env={"TERM": "dumb", "COLUMNS": "200"}).output
    assert "[required]" in next(line for line in shown.splitlines() if "--out" in line and "File" in line)


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(StackError) as raised:
        tree(path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_files_that_cannot_be_read_are_a_sentence(tmp_path: Path) -> None:
    garbage, deep, empty = (tmp_path / name for name in ("garbage", "deep", "empty"))
    garbage.write_bytes(random.Random(1).randbytes(10_000_000))
    deep.write_bytes(b"[" * 10_000_000)
    empty.touch()
    assert "it is no JSON" in refused(garbage)
    assert "nested too deeply" in refused(deep)
    assert refused(empty) == f"{empty}: it is empty"
    assert refused(tmp_path / "absent") == f"{tmp_path / 'absent'} cannot be read: No such file or directory"
    assert "cannot be read: Is a directory" in refused(tmp_path)
    assert "allowed are requests, har" in refused(empty, format_name="word")


async def test_what_others_wrote_does_not_steer_the_terminal(gyre: Gyre, tmp_path: Path) -> None:
    call = {"type": "assistant", "uuid": "u", "parentUuid": None}
    call["message"] = {"id": "\x1b[2J[red]x", "content": [{"type": "text", "text": "hi"}]}
    ask = {"type": "user", "uuid": "q", "parentUuid": None, "message": {"role": "user", "content": "go"}}
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in (ask, {**call, "parentUuid": "q"})))
    shown = await gyre.run_plain("trajectory", "tree", str(tmp_path / "a.jsonl"), "--calls")
    assert "\x1b" not in shown
    assert "·[2J[red]x" in shown


async def test_files_beside_a_log_are_found(gyre: Gyre) -> None:
    found = await gyre.plain("trajectory", "tree", str(FIXTURES / "claude_main.jsonl"))
    assert found["agents"] == {"e7": 2, "main": 3}
    continued = await gyre.plain("trajectory", "tree", str(FIXTURES / "run.trajectory.json"))
    assert continued["calls"] == 3


async def test_a_log_names_no_file_outside_its_folder(gyre: Gyre, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    document = {"schema_version": "ATIF-v1.7", "steps": [{"step_id": 1, "source": "agent", "message": "x"}]}
    (tmp_path / "other.json").write_text(json.dumps(document))
    (tmp_path / "logs" / "link.json").symlink_to(tmp_path / "other.json")
    for name in ("../other.json", str(tmp_path / "other.json"), "link.json"):
        (tmp_path / "logs" / "a.json").write_text(json.dumps({**document, "continued_trajectory_ref": name}))
        found = await gyre.plain("trajectory", "tree", str(tmp_path / "logs" / "a.json"))
        assert (found["calls"], len(found["warnings"])) == (1, 1)


async def test_a_tokenizer_from_a_directory(gyre: Gyre, tmp_path: Path) -> None:
    log = FIXTURES / "claude_rewind.jsonl"
    words = sorted(set(re.findall(r"\w+|[^\w\s]+", log.read_text())))
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    found = await gyre.plain("trajectory", "tree", str(log), "--tokenizer", str(tmp_path))
    assert (found["unit"], found["leaves"], found["calls"]) == ("tokens", 3, 4)
    assert found["path_tokens"] > 20
    sentence = await gyre.refused_plain("trajectory", "tree", str(log), "--tokenizer", str(tmp_path / "none"))
    assert "allowed is a directory with a tokenizer.json" in sentence
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in await gyre.refused_plain("trajectory", "tree", str(log), "--tokenizer", str(tmp_path))
