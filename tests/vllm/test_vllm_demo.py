"""The demo with its policy served by vLLM: cells switch by ending and starting a server, and no episode dies of it."""

import os
from pathlib import Path

import pytest

from opengyre.shared.vllm import interpreter
from support.stack import demonstrated, marked

UPDATES = 4


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(720)
def test_the_demo_keeps_its_promises_with_vllm(tmp_path: Path) -> None:
    python = interpreter(os.environ.get("GYRE_HOST__VLLM_PYTHON"))
    options = ("--engine", "vllm", "--updates", str(UPDATES))
    _, summary = demonstrated(tmp_path, *options, timeout_s=700, GYRE_HOST__VLLM_PYTHON=python)
    assert summary["episodes_interrupted"] == 0
    assert summary["accounting"]["balances"]
    assert len(summary["curve"]) == UPDATES
    assert summary["weight_versions"]["applied"] == UPDATES // 2 + 1
    assert summary["role_switches"] >= 1
    assert marked(tmp_path / "runs" / "demo" / "state") == {}
