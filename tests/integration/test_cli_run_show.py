"""`gyre run show` of a run that a broker has recorded."""

import asyncio
import json
import os
import subprocess
import sys
import termios
from pathlib import Path

from opengyre.proto import subjects
from opengyre.proto.run import RunSpec
from opengyre.proto.task import Check, GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.update import Committed, UpdateStats
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.bus import Bucket, Bus
from support.gyre_command import Gyre

CHECK = Check(name="a", command="true", weight=1.0)


async def evaluated(bus: Bus, name: str, family: str, score: float) -> None:
    spec = TaskSpec(task=name, instruction="go", checks=(CHECK,), purpose="evaluate", family=family)
    group, execution = f"r-{name}", f"r-{name}-e00"
    scored = GroupScored(
        run="r", task=name, group=group, outcome="evaluated", scores={execution: score}, sampled_version_min=0,
        sampled_version_max=0, tokens=1,
    )  # fmt: skip
    for event, what in (
        (TaskSubmitted(run="r", task=name, spec=spec), "submitted"),
        (TaskAdmitted(run="r", task=name, group=group, executions=(execution,), version=0), "admitted"),
        (scored, "scored"),
    ):
        await bus.publish(subjects.task("r", name, what), event)


async def test_a_run_that_there_is_not_is_named_with_those_that_there_are(
    bus: Bus, nats_server, tmp_path: Path
) -> None:
    """`gyre run show` said of any name that the run has recorded nothing yet."""
    gyre = Gyre(nats_server.url, tmp_path)
    assert await gyre("run", "show", "nothere") == (1, "", "gyre: there is no run nothere; there are: none yet\n")
    for name in ("two", "one"):
        await Bucket(bus, subjects.KV_RUNS, RunSpec).put(name, RunSpec(run=name, model="unused"))
    assert await gyre("run", "show", "nothere") == (1, "", "gyre: there is no run nothere; there are: one, two\n")
    sentence = "gyre: run 'bad name/' is not allowed: 1 to 32 of the characters A-Z a-z 0-9 _\n"
    assert await gyre("run", "show", "bad name/") == (1, "", sentence)


async def test_held_out_scores_are_shown_by_family(bus: Bus, nats_server, tmp_path: Path) -> None:
    gyre = Gyre(nats_server.url, tmp_path)
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put("r", RunSpec(run="r", model="unused"))
    status, _, said = await gyre("run", "show", "r")
    assert (status, "no update and no evaluation yet" in said) == (1, True)
    manifest = Manifest(run="r", version=0, parent=None, step=0, directory="/w", files=())
    await bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))
    train = TaskSpec(task="w9", instruction="go", checks=(CHECK,), family="trained")
    await bus.publish(subjects.task("r", "w9", "submitted"), TaskSubmitted(run="r", task="w9", spec=train))
    for name, family, score in (("w0", "write", 1.0), ("c0", "[count]", 0.5), ("w1", "write", 0.0)):
        await evaluated(bus, name, family, score)

    _, shown, _ = await gyre("run", "show", "r")
    words = [line.split() for line in shown.splitlines()]
    assert ["version", "score", "solved", "write", "[count]"] in words
    assert ["0", "0.500", "1", "0.50", "0.50"] in words
    _, shown, _ = await gyre("run", "show", "r", "--markdown")
    assert shown.splitlines() == [
        "| version | score | solved | write | [count] |",
        "| --: | --: | --: | --: | --: |",
        "| 0 | 0.500 | 1 | 0.50 | 0.50 |",
        "",
        "held-out tasks of each version: 3",
    ]
    _, shown, _ = await gyre("run", "show", "r", "--json")
    (one,) = json.loads(shown)["evaluations"]
    assert one["families"] == {"[count]": {"score": 0.5, "tasks": 1}, "write": {"score": 0.5, "tasks": 2}}
    assert (one["solved"], json.loads(shown)["families"]) == (1, ["write", "[count]"])


def on_a_terminal(width: int, url: str, state: Path, *arguments: str) -> str:
    """What the command shows on a terminal of that width."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (50, width))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"GYRE_BUS__URL": url, "GYRE_STATE_DIR": str(state), "TERM": "dumb"}
    command = [sys.executable, "-m", "opengyre.cli", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # how Linux says that nobody holds the other end any more
            pass
        finally:
            os.close(ours)
    assert running.returncode == 0, shown
    return shown.decode().replace("\r\n", "\n")


async def test_a_terminal_of_80_columns_cuts_no_figure(bus: Bus, nats_server, tmp_path: Path) -> None:
    """Scores were shown as `0…`. A pipe has one table of each kind, however wide."""
    manifest = Manifest(run="r", version=0, parent=None, step=0, directory="/w", files=())
    await bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))
    families = [f"family-{number:02}" for number in range(16)]
    for family in families:
        await evaluated(bus, f"t{family[-2:]}", family, 0.25)
    stats = UpdateStats(executions=4, tokens=17704, path_tokens=1168440, unique_tokens=117704, busy_s=1126.6)
    committed = Committed(
        run="r", update=1, attempt="a", version=1, published=True, groups=("g",), executions=("g-e00",), staleness=(0,),
        score=0.489, gradient_norm=1.0, stats=stats,
    )  # fmt: skip
    await bus.publish(subjects.update("r", "committed"), committed)

    shown = await asyncio.to_thread(on_a_terminal, 80, nats_server.url, tmp_path, "run", "show", "r")
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = [line.split() for line in shown.splitlines()]
    assert ["update", "score", "held-out", "gap", "trained", "unique", "path", "d"] in words
    assert ["1", "0.489", "-", "-", "17704", "117704", "1168440", "0.00"] in words
    assert ["update", "rollout", "training", "wait", "commit", "weights", "seconds"] in words
    assert [name for line in words if line[:1] == ["version"] for name in line[1:]] == ["score", "solved", *families]
    _, piped, _ = await Gyre(nats_server.url, tmp_path).program("run", "show", "r")
    words = [line.split() for line in piped.splitlines()]
    assert ["version", "score", "solved", *families] in words
    assert ["1", "0.489", "-", "-", "17704", "117704", "1168440", "0.00", "-", "1126.6", *["-"] * 4] in words
