"""`gyre bench router` in the small: a real host, rollout service and broker, calls both ways."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.cli.bench_processes import beside, place, program
from opengyre.cli.bench_router_stack import refused, stack
from opengyre.cli.stack import StackError
from opengyre.proto import subjects
from opengyre.proto.weights import WeightsRefused
from opengyre.shared.bus import Bus, bootstrap

SOON_S = 60.0
"""For what takes a second on a machine that does nothing else."""


async def test_a_program_of_the_bench_that_ends_is_noticed_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo first; echo 'host: setting x is 3'; exit 2"]
    with pytest.raises(ExceptionGroup) as told:
        async with (
            asyncio.timeout(SOON_S),
            program(command, dict(os.environ), tmp_path / "host.log") as host,
            beside(host.ended()),
        ):
            await asyncio.Event().wait()
    assert told.value.subgroup(StackError) is not None
    assert str(told.value.exceptions[0]) == "the host of the bench has ended: host: setting x is 3"


async def test_a_program_that_the_bench_ends_is_no_fault(tmp_path: Path) -> None:
    async with program(["sleep", "60"], dict(os.environ), tmp_path / "host.log") as host, beside(host.ended()):
        await asyncio.sleep(0)
    assert host.process.returncode == -signal.SIGTERM


async def test_a_host_that_refuses_the_version_of_the_bench_ends_it_with_the_reason(bus: Bus) -> None:
    await bootstrap(bus)
    event = WeightsRefused(run="bench", version=0, host="h", boot="b", error="host.vllm_kv_gb is 1000: leave 18 GiB")
    await bus.publish(subjects.weights("bench", "refused"), event)
    with pytest.raises(ExceptionGroup) as told:
        async with asyncio.timeout(SOON_S), beside(refused(bus)):
            await asyncio.Event().wait()
    assert str(told.value.exceptions[0]).endswith("does not serve: host.vllm_kv_gb is 1000: leave 18 GiB")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        # Both programs read it, and either may be the first to end.
        (
            "GYRE_HOST__VLLM_DTYPE",
            "int3",
            r"the (host|rollout) of the bench has ended: \1: setting host\.vllm_dtype is 'int3'",
        ),
        pytest.param(
            "GYRE_HOST__VLLM_PYTHON",
            "/nowhere",
            r"the host of the bench does not serve: host\.vllm_python is /nowhere",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_host_of_the_bench_that_cannot_serve_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    """Where what is looked at beforehand has not found it."""
    monkeypatch.setenv(name, value)
    said: list[str] = []
    with pytest.raises(ExceptionGroup) as told:
        async with asyncio.timeout(200), stack("vllm", 1, tmp_path, said.append):
            pytest.fail("it is not ready")
    error: BaseException = told.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert re.match(sentence, str(error))
    assert said[0] == "starts a broker, a host with engine vllm and the rollout service"


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
