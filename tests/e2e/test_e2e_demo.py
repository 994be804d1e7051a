"""The demo as a person starts it, with fewer updates and a policy that is made in seconds."""

from pathlib import Path

import pytest

from support.stack import demonstrated, marked

UPDATES = 8


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.sandbox
@pytest.mark.timeout(900)
def test_the_demo_keeps_its_promises_and_leaves_nothing(tmp_path: Path) -> None:
    done, summary = demonstrated(tmp_path, "--updates", str(UPDATES), timeout_s=880)
    for word in ("update", "score", "versions", "cells", "staleness", "episodes"):
        assert word in done.stderr
    assert "all kept" in done.stdout
    assert [point["update"] for point in summary["curve"]] == list(range(1, UPDATES + 1))
    assert summary["episodes_interrupted"] == 0
    assert summary["accounting"]["balances"]
    for terms in (summary["accounting"]["groups"], summary["accounting"]["executions"]):
        dropped = sum(terms["dropped"].values())
        assert terms["dispatched"] == terms["trained"] + dropped + terms["ready"] + terms["live"]
    assert summary["weight_versions"]["published"] == UPDATES // 2 + 1
    # One that the next has overtaken while every host trained is applied by none.
    assert summary["weight_versions"]["applied"] >= UPDATES // 2
    assert summary["role_switches"] >= 6
    assert summary["staleness"]["predicted"] == 1.0
    assert summary["staleness"]["max"] >= 1
    assert summary["evaluation"].keys() == {"before", "after"}
    assert {"start", "evaluate_before", "train", "evaluate_after", "stop", "total"} <= summary["wall_s"].keys()
    assert marked(tmp_path / "runs" / "demo" / "state") == {}
