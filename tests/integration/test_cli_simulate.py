"""`gyre simulate` and `gyre tune` as a person runs them; `gyre bench` as far as it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.cli.recorded_run import _read
from opengyre.proto import subjects
from opengyre.proto.codec import encode
from opengyre.proto.decision import Decision
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.shared.bus import Bucket, Bus
from opengyre.sim.recorded import TooLittleRecordedError

GYRE = [sys.executable, "-m", "opengyre.cli"]
RECIPE = """
[workload]
nodes = 8
mean_h = 1.0
rollout_node_h = 6.0
train_node_h = 3.0

[run]
updates = 4
[run.dispatch]
phi = 0.5
mu = 2
batch_groups = 4
group_size = 4
close_at = 3
"""


def gyre(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GYRE, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def test_table1_prints_seven_rows_and_ours() -> None:
    done = gyre("simulate", "table1", "--json", "--seeds", "8")
    rows = json.loads(done.stdout)
    assert [row["id"] for row in rows] == ["A0", "A1", "A2", "A3", "C0", "C1", "E0", "ours"]
    for row in rows:
        assert {"id", "hours", "ratio", "staleness_mean", "efficiency"} <= row.keys()
        assert row["seeds"] == 8


def test_a_recipe_is_simulated_with_its_timeline(tmp_path: Path) -> None:
    recipe, timeline = tmp_path / "r.toml", tmp_path / "t.json"
    recipe.write_text(RECIPE)
    done = gyre("simulate", recipe, "--json", "--seeds", "2", "--timeline", timeline)
    facts = json.loads(done.stdout)
    assert facts["cells"] == 8
    assert facts["updates"] == 4
    assert facts["hours"] >= facts["floor_hours"]
    moments = json.loads(timeline.read_text())
    assert moments == facts["timeline"]
    assert moments[0]["hour"] == 0
    assert moments[-1]["version"] == 4
    assert all(m["serving"] + m["training"] + m["switching"] == 8 for m in moments)


def test_tune_reads_a_recipe_and_advises(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE)
    done = gyre("tune", "--max-staleness", "0.5", "--recipe", recipe, "--seeds", "1", "--updates", "4", "--json")
    advice = json.loads(done.stdout)
    assert advice["present"]["phi"] == 0.5
    assert advice["best"]["staleness_mean"] <= 0.5
    assert advice["says"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("mu = 2", "mu = 0"), "dispatch.mu is 0; allowed are values from 1 to 64"),
        (("phi = 0.5", "phi = -1"), "dispatch.phi is -1.0; allowed are values from 0 to 64"),
        (("close_at = 3", "close_at = 9"), "dispatch.close_at is 9; allowed are values from 2 to 4"),
        (("nodes = 8", "nodes = 0"), "workload.nodes is 0; allowed are values from 1 to"),
        (("nodes = 8", "gpus = 8"), "unknown field workload.gpus; allowed: nodes"),
        (("mean_h = 1.0", "mean_h = 'x'"), "workload.mean_h is 'x'; allowed is a number"),
        (("updates = 4", "updates = 4\n[run.elastic]\npolicy = 'coarse'"), "elastic.standalone_cells is 0; allowed"),
        (
            ("updates = 4", "updates = 4\n[run.elastic]\nmin_train_cells = 3\nmax_train_cells = 2"),
            "elastic.max_train_cells is 2; allowed are values from 3",
        ),
        (("mu = 2", "mu = 1.5"), "in [run.dispatch]: mu is 1.5; allowed: a whole number"),
        (
            ("updates = 4", "updates = 4\n[run.elastic]\npolicy = 'foo'"),
            "policy is 'foo'; allowed: 'fine', 'static', 'global', 'coarse'",
        ),
        (
            ("updates = 4", "updates = 4\n[run.elastic]\nmin_rollout_cells = 5\nmin_train_cells = 5"),
            "elastic.min_train_cells is 5 and elastic.min_rollout_cells is 5, 10 together, but there are 8 cells",
        ),
        (
            ("updates = 4", "updates = 4\n[run.elastic]\npolicy = 'static'\ntrain_cells = 9"),
            "elastic.train_cells is 9 and one at least has to serve, 10 together, but there are 8 cells",
        ),
        (("phi", "psi"), "unknown field run.dispatch.psi; allowed: phi, mu"),
    ],
)
def test_a_recipe_that_cannot_be_is_one_sentence(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE.replace(*change))
    done = gyre("simulate", recipe)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("simulate", "table9"), "table9 does not exist; allowed: table1, frontier, scale, page, or a recipe"),
        (("simulate", "table1", "--switch-hours", "-1"), "--switch-hours: workload.switch_h is -1.0; allowed"),
        (("tune", "--max-staleness", "1", "--from", "x", "--recipe", "y"), "--from and --recipe name two workloads"),
        (("simulate", "table1", "--updates", "3"), "--updates is for a recipe; table1 does not take it"),
        (("bench", "table1", "--keep", "/proc/x"), "--keep: /proc/x cannot be made: "),
        (("bench", "table1", "--rows", "A0,Z9"), "--rows names 'Z9'; allowed: A0, A1, A2, A3, C0, C1, E0, ours"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = gyre(*arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_young_run_is_one_error_and_no_group_of_them(bus: Bus) -> None:
    """`gyre tune --from` of a run without whole groups ended in sixty lines of traceback."""
    status = HostStatus(host="h", cell="h", boot="b", state=HostState.ROLLOUT, epoch=0, url="u", engine="tiny")
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put("young", RunSpec(run="young", model="m"))
    await Bucket(bus, subjects.KV_HOSTS, HostStatus).put("h", status)
    with pytest.raises(TooLittleRecordedError, match="run young has 0 groups"):
        await _read(bus, "young")


def test_a_replay_of_nothing_is_no_success(tmp_path: Path) -> None:
    """A file without a decision of the run was told to come out the same."""
    log = tmp_path / "log.jsonl"
    event = encode(Decision(run="other", decision="1-0", kind="wish")).decode()
    log.write_text(json.dumps({"event": json.loads(event)}) + "\n")
    done = gyre("decisions", "replay", "mine", "--from", log)
    assert done.returncode == 1
    assert "does not hold a decision of run mine; runs in it: other" in done.stderr
    assert gyre("decisions", "replay", "other", "--from", log).returncode == 0
