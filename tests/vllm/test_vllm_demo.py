"""The demo with its policy served by vLLM: cells switch by ending and starting a server, and no episode dies of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.cli.demo_plan import warm_start_name
from opengyre.shared.vllm import interpreter
from support.stack import make_policy, marked

UPDATES = 4


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(500)
def test_the_demo_keeps_its_promises_with_vllm(tmp_path: Path) -> None:
    cached = tmp_path / "runs" / "cache" / warm_start_name(1)
    cached.parent.mkdir(parents=True)
    shutil.move(make_policy(tmp_path), cached)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GYRE_")}
    environment["GYRE_HOST__VLLM_PYTHON"] = interpreter(os.environ.get("GYRE_HOST__VLLM_PYTHON"))
    done = subprocess.run(
        [sys.executable, "-m", "opengyre.cli", "demo", "--headless", "--engine", "vllm", "--updates", str(UPDATES)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert summary["episodes_interrupted"] == 0
    assert summary["accounting"]["balances"]
    assert len(summary["curve"]) == UPDATES
    assert summary["weight_versions"]["applied"] == UPDATES // 2 + 1
    assert summary["role_switches"] >= 1
    assert marked(tmp_path / "runs" / "demo" / "state") == {}
