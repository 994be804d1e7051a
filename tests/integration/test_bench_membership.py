"""`gyre bench membership` in the small: members come, leave and die, and each is told."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

GYRE = [sys.executable, "-m", "opengyre.cli", "bench", "membership"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GYRE, *arguments], capture_output=True, text=True, timeout=200, check=False)


def test_survivors_sum_again_and_a_way_that_is_not_there_says_so() -> None:
    done = bench("--ways", "regroup,torchft", "--parameters", "1000", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    regroup, other = json.loads(done.stdout)
    assert regroup["missing"] is None
    assert 0 < regroup["step_ms"] < regroup["join_ms"]
    # Far below the time-out of a collective: a survivor that waits for another runs into that.
    assert regroup["kill_stall_ms"] < 10_000
    assert other["missing"] in (None, "torchft is not installed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ways", "mpi"), "--ways names 'mpi'; allowed: blobs, regroup, torchft"),
        (("--parameters", "0"), "--parameters names '0'; allowed: whole numbers from 1 to 1000000000"),
    ],
)
def test_options_out_of_range_are_refused(arguments: tuple[str, ...], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())
