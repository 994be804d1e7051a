"""`gyre bench router` in the small: a real host, rollout service and broker, calls both ways."""

import json
import os
import subprocess
import sys

import pytest

from opengyre.cli.bench_processes import place


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a program can be put on one of several processors only")
def test_a_program_and_what_it_starts_stay_on_the_processors_that_are_said() -> None:
    code = "import subprocess, sys, time; sys.stdin.readline(); subprocess.run(['nproc']); time.sleep(60)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as program:
        try:
            place([program.pid], [max(os.sched_getaffinity(0))])
            assert os.sched_getaffinity(program.pid) == {max(os.sched_getaffinity(0))}
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "1\n"
        finally:
            program.kill()


@pytest.mark.torch
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
