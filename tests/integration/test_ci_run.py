"""What CI runs, with a `make` of ours: which targets it asks for, in which order, and what its end says."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
echo "$1" >> asked
case " $SLOW " in *" $1 "*) sleep 60;; esac
echo "== $1 ended =="
case " $FAILS " in *" $1 "*) exit 2;; esac
"""
CLOSES = "== {} ended =="


def ran(folder: Path, *, fails: str = "", slow: str = "", bound: str = "30") -> tuple[int, list[str], list[str]]:
    """Exit status, targets, lines of output."""
    (folder / ".ci").mkdir()
    shutil.copy(SCRIPT, folder / ".ci" / "run")
    make = folder / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{make.parent}:{os.environ['PATH']}", "FAILS": fails, "SLOW": slow,
        "CI_VLLM_INSTALL_S": bound,
    }  # fmt: skip
    done = subprocess.run(
        [folder / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, (folder / "asked").read_text().split(), done.stdout.splitlines()


def test_both_suites_run_where_vllm_installs(tmp_path: Path) -> None:
    status, asked, lines = ran(tmp_path)
    assert (status, asked) == (0, ["vllm", "test", "test-vllm"])
    assert lines[-1] == CLOSES.format("test-vllm")


@pytest.mark.parametrize(("fails", "slow", "bound"), [("vllm", "", "30"), ("", "vllm", "0.2")], ids=["fails", "slow"])
def test_ci_goes_on_and_says_so_where_vllm_does_not_install(tmp_path: Path, fails: str, slow: str, bound: str) -> None:
    status, asked, lines = ran(tmp_path, fails=fails, slow=slow, bound=bound)
    assert (status, asked) == (0, ["vllm", "test"])
    assert f"vLLM was not installed within {bound} s; CI goes on without its tests (make test-vllm)" in lines
    assert lines[-1] == CLOSES.format("test")


@pytest.mark.parametrize(("suite", "asked"), [("test", ["vllm", "test"]), ("test-vllm", ["vllm", "test", "test-vllm"])])
def test_a_suite_that_fails_fails_ci(tmp_path: Path, suite: str, asked: list[str]) -> None:
    status, found, lines = ran(tmp_path, fails=suite)
    assert status != 0
    assert found == asked
    assert lines[-1] == CLOSES.format(suite)


@pytest.mark.parametrize(("target", "chosen"), [("test", "-m 'not vllm'"), ("test-vllm", "-m vllm tests/vllm")])
def test_the_ordinary_suite_leaves_vllms_tests_to_theirs(target: str, chosen: str) -> None:
    command = ("make", "--dry-run", "--directory", str(SCRIPT.parents[1]), target)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in done.stdout.splitlines() if f"pytest {chosen}" in line]
