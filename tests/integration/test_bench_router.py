"""`gyre bench router` in the small: a real host, rollout service and broker, calls both ways."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch


def test_calls_both_ways_and_where_their_time_goes() -> None:
    command = [
        sys.executable,
        "-m",
        "opengyre.cli",
        "bench",
        "router",
        "--rounds",
        "1",
        "--turns",
        "3",
        "--tokens",
        "4",
    ]
    done = subprocess.run(
        [*command, "--concurrency", "2", "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    direct, via = facts["rows"]
    assert (direct["way"], via["way"]) == ("direct", "via")
    assert direct["calls"] == via["calls"] == 6
    assert direct["prompt_tokens"] == pytest.approx(via["prompt_tokens"], abs=2)
    assert direct["sampled_tokens"] == via["sampled_tokens"]
    names = {stage["name"]: stage["alone"] for stage in facts["stages"]}
    assert {"parse", "render", "route", "engine", "host", "read", "append", "write"} < set(names)
    assert all(spread["count"] == 6 for spread in names.values())
    assert names["engine"]["median_ms"] > 20, "four tokens at a hundred a second, and not less"
