"""A run that is followed: its updates as they are committed, its evaluations as they are whole.

Awaits: the gateway's answers, each within the client's bound; between two looks `LOOK_S`.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from opengyre.cli import hosts, staleness
from opengyre.cli.client import Api, ClientError, console, errors, number, show_json
from opengyre.cli.recipe import Plan

LOOK_S: Final = 1.0
AWAY_S: Final = 120.0
"""How long the gateway may be away while a run is followed."""
EVALUATION_S: Final = 300.0
"""How long nothing may come of evaluations after a run's last update."""
SHOWN: Final = 8


class Evaluations:
    """Scores of the held-out tasks, by version. Pure."""

    def __init__(self, plan: Plan) -> None:
        self._version = {task.task: task.from_version for task in plan.evaluation}
        self._scores: dict[str, float | None] = {}
        self._told: set[int] = set()

    @property
    def missing(self) -> int:
        """Tasks of which nothing is known yet."""
        return len(self._version) - len(self._scores)

    @property
    def known(self) -> int:
        return len(self._scores)

    def take(self, tasks: list[dict[str, Any]]) -> None:
        """Tasks as the gateway lists them."""
        for task in tasks:
            if task["task"] in self._version and task["state"] == "done":
                self._scores[task["task"]] = task["mean_score"]

    def fresh(self) -> list[dict[str, Any]]:
        """Versions that are wholly evaluated now and were not before."""
        found: list[dict[str, Any]] = []
        for version in sorted(set(self._version.values()) - self._told):
            names = [name for name, of in self._version.items() if of == version]
            if all(name in self._scores for name in names):
                self._told.add(version)
                scores = [score for name in names if (score := self._scores[name]) is not None]
                mean = sum(scores) / len(scores) if scores else None
                found.append({"evaluated_version": version, "score": mean, "tasks": len(scores)})
        return found


class Followed:
    """What is known of a run that is followed; `look` asks for what is new."""

    def __init__(self, api: Api, plan: Plan) -> None:
        self._api = api
        self.run = plan.run.run
        self.updates: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.hosts: dict[str, Any] = {}
        self.state = "active"
        self.evaluations = Evaluations(plan)
        self.evaluated: list[dict[str, Any]] = []
        self._groups = -1
        self._after = 0

    def look(self) -> list[dict[str, Any]]:
        """Ask once; the updates and the evaluations that are new."""
        # The state first: what was committed before a run ended is then among the updates.
        self.state = self._api.get(f"/v1/runs/{self.run}")["spec"]["state"]
        new: list[dict[str, Any]] = []
        more: int | None = self._after
        while more is not None:
            page = self._api.get("/v1/updates", run=self.run, after=more, limit=500)
            new += page["updates"]
            more = page["next"]
        if new:
            self._after = new[-1]["sequence"]
        self.updates += new
        self.status = self._api.get("/v1/status")
        self.hosts = self._api.get("/v1/hosts")
        fresh = self._evaluated()
        self.evaluated += fresh
        return new + fresh

    def _evaluated(self) -> list[dict[str, Any]]:
        """Versions that are wholly evaluated since the last look. Tasks are listed when one more was evaluated, and
        once the run is over, when one may have been given up."""
        groups = (self.status.get("staleness") or {}).get("evaluated_groups", 0)
        if not self.evaluations.missing or (groups == self._groups and self.state == "active"):
            return []
        after: int | None = 0
        while after is not None:
            page = self._api.get("/v1/tasks", run=self.run, after=after, limit=200)
            self.evaluations.take(page["tasks"])
            after = page["next"]
        self._groups = groups
        return self.evaluations.fresh()

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state == "stopped" or (self.state == "finished" and not self.evaluations.missing)

    def view(self) -> RenderableType:
        """The run as it is now."""
        columns = ("update", "score", "published", "d mean", "d max", "tokens", "grad norm", "gap", "s")
        table = Table(*columns, title=self.run)
        for update in self.updates[-SHOWN:]:
            table.add_row(
                str(update["update"]),
                number(update["score"], 3),
                "yes" if update["published"] else "",
                number(update["staleness_mean"]),
                "-" if update["staleness_max"] is None else str(update["staleness_max"]),
                str(update["tokens"]),
                number(update["gradient_norm"], 3),
                gap(update),
                number(update["seconds"], 1),
            )
        parts: list[RenderableType] = [table]
        if self.evaluated:
            scores = ", ".join(
                f"{number(one['score'], 3)} of version {one['evaluated_version']}" for one in self.evaluated
            )
            parts.append(Text(f"held-out score: {scores}"))
        if self.hosts:
            parts.append(hosts.table(self.hosts))
        report = self.status.get("staleness")
        if report is not None:
            parts.append(staleness.books(report))
        parts += [Text(f"held: {sentence}") for sentence in self.status.get("held") or []]
        waits = self.status.get("waits") or []
        parts += [Text(f"{wait['service']} waits for {wait['what']} ({wait['since_s']:.0f} s)") for wait in waits[:5]]
        return Group(*parts)


def follow(api: Api, plan: Plan, json: bool) -> None:
    """Show the run until it is over."""
    followed = Followed(api, plan)
    if json or not console.is_terminal:
        _look_until_over(followed, lambda new: _lines(new, json))
    else:
        with Live(followed.view(), console=console, auto_refresh=False) as live:
            _look_until_over(followed, lambda _: live.update(followed.view(), refresh=True))
    if not json:
        console.print(f"run [bold]{followed.run}[/] is {followed.state} after {len(followed.updates)} updates")
    if not followed.over:
        errors.print(
            f"{followed.evaluations.missing} held-out tasks have no score; `gyre waits` says what they wait for"
        )


def _lines(new: list[dict[str, Any]], json: bool) -> None:
    for one in new:
        if json:
            show_json(one)
        elif "evaluated_version" in one:
            console.print(
                f"version {one['evaluated_version']}: held-out score {number(one['score'], 3)} of {one['tasks']} tasks"
            )
        else:
            _line(one)


def gap(update: dict[str, Any]) -> str:
    """Mean gap of trainer and engine at one version, nats; `-` where the update has no token of its version."""
    return "-" if update["logprob_gap"] is None else f"{update['logprob_gap']:.1e}"


def _line(update: dict[str, Any]) -> None:
    console.print(
        f"update {update['update']}: score {number(update['score'], 3)}, version {update['version']}, "
        f"d {number(update['staleness_mean'])}, {update['tokens']} tokens, gap {gap(update)}, "
        f"{number(update['seconds'], 1)} s"
    )
    for what in ("skipped", "alarm"):
        if update.get(what) is not None:
            console.print(f"update {update['update']}: {what}: {update[what]}")


def _look_until_over(followed: Followed, show: Callable[[list[dict[str, Any]]], None]) -> None:
    heard = ended = time.monotonic()
    known = -1
    while True:
        try:
            new = followed.look()
        except ClientError as error:
            if not error.passing or time.monotonic() - heard > AWAY_S:
                raise
            new = []
        else:
            heard = time.monotonic()
        show(new)
        if followed.state == "active" or followed.evaluations.known != known:
            ended, known = time.monotonic(), followed.evaluations.known
        if followed.over or time.monotonic() - ended > EVALUATION_S:
            return
        time.sleep(LOOK_S)
