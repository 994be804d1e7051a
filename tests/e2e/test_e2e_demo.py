"""The demo as a person starts it, with fewer updates and a policy that is made in seconds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.cli.demo_plan import warm_start_name
from support.stack import make_policy, marked

UPDATES = 8


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(400)
def test_the_demo_keeps_its_promises_and_leaves_nothing(tmp_path: Path) -> None:
    cached = tmp_path / "runs" / "cache" / warm_start_name(1)
    cached.parent.mkdir(parents=True)
    shutil.move(make_policy(tmp_path), cached)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GYRE_")}
    done = subprocess.run(
        [sys.executable, "-m", "opengyre.cli", "demo", "--headless", "--updates", str(UPDATES)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    for word in ("update", "score", "versions", "cells", "staleness", "episodes"):
        assert word in done.stderr
    assert "all kept" in done.stdout
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert [point["update"] for point in summary["curve"]] == list(range(1, UPDATES + 1))
    assert summary["episodes_interrupted"] == 0
    assert summary["accounting"]["balances"]
    for terms in (summary["accounting"]["groups"], summary["accounting"]["executions"]):
        dropped = sum(terms["dropped"].values())
        assert terms["dispatched"] == terms["trained"] + dropped + terms["ready"] + terms["live"]
    assert summary["weight_versions"]["applied"] == summary["weight_versions"]["published"] == UPDATES // 2 + 1
    assert summary["role_switches"] >= 6
    assert summary["staleness"]["predicted"] == 1.0
    assert summary["staleness"]["max"] >= 1
    assert summary["evaluation"].keys() == {"before", "after"}
    assert {"start", "evaluate_before", "train", "evaluate_after", "stop", "total"} <= summary["wall_s"].keys()
    assert marked(tmp_path / "runs" / "demo" / "state") == {}
