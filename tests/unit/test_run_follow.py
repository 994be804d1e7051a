"""Following a run: what is new is told once, and the end waits for the evaluation of the last policy."""

from typing import Any

import pytest

from opengyre.cli import run_follow
from opengyre.cli.recipe import Plan
from opengyre.cli.run_follow import Evaluations, Followed
from opengyre.proto.run import RunSpec
from opengyre.proto.task import TaskSpec


def held_out(version: int, number: int) -> TaskSpec:
    return TaskSpec(task=f"t{number}-v{version}", instruction="x", purpose="evaluate", from_version=version)


PLAN = Plan(
    run=RunSpec(run="r", model="m", updates=2),
    tasks=(),
    evaluation=tuple(held_out(version, number) for version in (0, 2) for number in (0, 1)),
)


def done(name: str, score: float | None) -> dict[str, Any]:
    return {"task": name, "state": "done", "mean_score": score}


class Gateway:
    """Answers as the gateway does; `tasks` are listed one a page."""

    def __init__(self) -> None:
        self.state = "active"
        self.tasks: list[dict[str, Any]] = []
        self.groups = 0
        self.listed = 0

    def get(self, path: str, **query: Any) -> Any:
        match path:
            case "/v1/runs/r":
                return {"spec": {"state": self.state}}
            case "/v1/updates":
                return {"updates": [], "next": None}
            case "/v1/status":
                return {"staleness": {"evaluated_groups": self.groups}}
            case "/v1/hosts":
                return {}
            case "/v1/tasks":
                self.listed += query["after"] == 0
                at = query["after"]
                page = self.tasks[at : at + 1]
                return {"tasks": page, "next": at + 1 if at + 1 < len(self.tasks) else None}
        raise AssertionError(path)


def test_a_version_is_told_once_when_all_its_tasks_are_done() -> None:
    known = Evaluations(PLAN)
    known.take([done("t0-v0", 0.5), {"task": "t1-v0", "state": "live", "mean_score": None}, done("other", 1.0)])
    assert (known.fresh(), known.missing) == ([], 3)
    known.take([done("t0-v0", 0.5), done("t1-v0", 0.0)])
    assert known.fresh() == [{"evaluated_version": 0, "score": 0.25, "tasks": 2}]
    assert known.fresh() == []
    known.take([done("t0-v2", None), done("t1-v2", None)])
    assert known.fresh() == [{"evaluated_version": 2, "score": None, "tasks": 0}], "given up, and no zero"
    assert known.missing == 0


def test_a_run_is_over_once_its_last_policy_is_evaluated_and_tasks_are_not_listed_in_vain() -> None:
    gateway = Gateway()
    followed = Followed(gateway, PLAN)  # type: ignore[arg-type]  # what is asked of the client is there
    gateway.tasks = [done("t0-v0", 0.5), done("t1-v0", 0.5)]
    assert [one["evaluated_version"] for one in followed.look()] == [0]
    assert (followed.look(), gateway.listed) == ([], 1)
    gateway.groups = 3
    gateway.state = "finished"
    gateway.tasks.append(done("t0-v2", 1.0))
    assert followed.look() == []
    assert not followed.over
    gateway.tasks.append(done("t1-v2", 0.5))
    assert [one["score"] for one in followed.look()] == [0.75]
    assert followed.over


def test_a_stopped_run_is_over_whatever_was_not_evaluated() -> None:
    gateway = Gateway()
    followed = Followed(gateway, PLAN)  # type: ignore[arg-type]  # what is asked of the client is there
    gateway.state = "stopped"
    followed.look()
    assert followed.over


def test_an_evaluation_that_never_comes_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_follow, "LOOK_S", 0.0)
    monkeypatch.setattr(run_follow, "EVALUATION_S", 0.05)
    gateway = Gateway()
    gateway.state = "finished"
    run_follow.follow(gateway, PLAN, json=True)  # type: ignore[arg-type]  # what is asked of the client is there
    assert capsys.readouterr().out == ""
