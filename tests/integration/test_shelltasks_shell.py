"""The tasks and demonstrations against a real shell: what they claim is so."""

import random
import subprocess
from pathlib import Path

import pytest

from opengyre.proto.task import TaskSpec
from opengyre.shelltasks.demonstrate import demonstrate
from opengyre.shelltasks.tasks import DONE, Plan, plan, reference, to_spec


def _place(spec: TaskSpec, directory: Path) -> Path:
    directory.mkdir()
    for name, text in spec.files.items():
        (directory / name).write_text(text)
    return directory


def _run(command: str, directory: Path) -> tuple[int, str]:
    ended = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    return ended.returncode, ended.stdout.decode().strip()


def _score(spec: TaskSpec, directory: Path) -> float:
    return sum(check.weight for check in spec.checks if _run(check.command, directory)[0] == 0)


def _plans() -> list[Plan]:
    return [plan(split, index, 3) for split in ("train", "eval") for index in range(10)]


@pytest.mark.parametrize("task", _plans(), ids=lambda task: task.task)
def test_nothing_done_scores_nothing_and_the_reference_everything(task: Plan, tmp_path: Path) -> None:
    spec = to_spec(task)
    directory = _place(spec, tmp_path / "w")
    assert _score(spec, directory) == 0
    for command in reference(task):
        assert _run(command, directory)[0] == 0
    assert _score(spec, directory) == pytest.approx(1)


def test_demonstrations_show_what_a_shell_prints_and_claim_what_it_makes(tmp_path: Path) -> None:
    rng = random.Random(1)
    partial = 0
    for index in range(60):
        task = plan("train", index, 4)
        shown = demonstrate(task, rng)
        spec = to_spec(task)
        directory = _place(spec, tmp_path / str(index))
        for turn in shown.turns:
            if turn.command != DONE:
                assert _run(turn.command, directory) == (0, turn.observation), turn
        score = _score(spec, directory)
        assert (score == pytest.approx(1)) == shown.right, shown
        partial += 0 < score < 0.99
    assert partial > 5


def test_partial_work_gets_partial_credit(tmp_path: Path) -> None:
    task = plan("train", 2, 3)
    spec = to_spec(task)
    directory = _place(spec, tmp_path / "w")
    _run(f"wc -l {task.source} > {task.target}", directory)
    assert _score(spec, directory) == pytest.approx(0.5)
    _run(f"echo nothing > {task.target}", directory)
    assert _score(spec, directory) == pytest.approx(0.2)
