"""Executions that went on as lanes, opened again and exported."""

from io import StringIO

import msgspec
from rich.console import Console

from opengyre.cli.trajectory_show import show
from opengyre.formats.export import COLUMNS, Recorded, atif_document, rows
from opengyre.gateway.examples import TREE_REPORT
from opengyre.proto.explain import ExplainReport
from opengyre.proto.traj import Ended, Forked, TrajEvent, Verified
from opengyre.trajectory.assemble import assemble
from opengyre.trajectory.explain import explain
from support.lane_logs import log, names, plain

WHOLE = names(2)
FIRST = log(WHOLE[0], WHOLE, 0, [(0, 1), (1,), (0,)], [1.0, 0.0, None], tools=True)
OTHER = plain(WHOLE[1], WHOLE, 1, 0.25)


def opened() -> ExplainReport:
    return explain(WHOLE[0], [*FIRST, *OTHER])


def test_each_lane_is_named_with_what_it_got() -> None:
    report = opened()
    assert (report.forked_at, report.score, report.calls, report.events) == (1, 0.5, 5, 5)
    assert [(one.lane, one.calls, one.score, one.advantage, one.weight) for one in report.lanes] == [
        (0, 2, 1.0, 0.75, 0.5), (1, 1, 0.0, -0.25, 0.5), (2, 1, None, None, None),
    ]  # fmt: skip
    assert [one.unscored for one in report.lanes] == [None, None, "infra"]
    assert [(one.lane, one.outcome, one.reason, one.weight, one.advantage) for one in report.per_call] == [
        (None, "trained", None, 1.0, 0.25),
        (0, "trained", None, 0.5, 0.75),
        (1, "trained", None, 0.5, -0.25),
        (0, "trained", None, 0.5, 0.75),
        (2, "refused", "unscored_lane", None, None),
    ]
    assert report.refused == {"unscored_lane": 1}


def test_it_says_what_went_to_the_trainer() -> None:
    (part,) = assemble([*FIRST, *OTHER])
    assert part.ready is not None
    member, report = part.ready.members[0], opened()
    assert report.trained_tokens == member.trained_tokens == 4
    assert [path.tokens for path in report.paths] == [len(one.tokens) for one in member.sequences]
    assert part.ready.refused == report.refused


def test_lanes_of_an_execution_that_is_live_are_told_as_far_as_it_goes() -> None:
    running = [event for event in FIRST if not isinstance(event, Ended | Verified)]
    report = explain(WHOLE[0], running)
    assert [(one.lane, one.calls, one.end_reason) for one in report.lanes] == [(0, 2, None), (1, 1, None), (2, 1, None)]
    assert {one.outcome for one in report.per_call} == {"not_trained"}
    assert not explain(WHOLE[1], OTHER).lanes


def shown(report: ExplainReport) -> list[str]:
    out = StringIO()
    show(Console(file=out, width=120, highlight=False), {**TREE_REPORT, "tree": msgspec.to_builtins(report)})
    return [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in out.getvalue().splitlines()]


def test_show_has_a_table_of_lanes_and_names_each_calls_lane() -> None:
    lines = shown(opened())
    at = lines.index("lanes, from turn 1 on")
    assert lines[at + 2] == "lane calls tokens score advantage weight end"
    assert lines[at + 4 : at + 7] == [
        "0 2 2 1.0000 +0.7500 0.5000 done", "1 1 1 0.0000 -0.2500 0.5000 done", "2 1 1 none (infra) - - done",
    ]  # fmt: skip
    assert "call lane turn role how prompt new credit outcome text" in lines
    assert not any("lane" in line for line in shown(explain(WHOLE[1], [*FIRST, *OTHER])))


def recorded(events: list[TrajEvent]) -> list[Recorded]:
    return [Recorded(float(event.index), event) for event in events]


def test_exports_have_each_call_with_the_command_and_the_verdict_of_its_lane() -> None:
    document = atif_document(WHOLE[0], recorded(FIRST), "1")
    steps = [step for step in document["steps"] if step["source"] == "agent"]
    assert [(step["extra"].get("lane"), step["tool_calls"][0]["arguments"]["command"]) for step in steps] == [
        (None, "None/0"), (0, "0/1"), (1, "1/1"), (2, "2/1"), (0, "0/2"),
    ]  # fmt: skip
    extra = document["extra"]
    assert (extra["verified_score"], list(extra["parts"])) == (0.5, [])
    assert [(one["lane"], one["verified_score"], one["infra_error"]) for one in extra["lanes"]] == [
        (0, 1.0, None), (1, 0.0, None), (2, None, "it was killed"),
    ]  # fmt: skip
    found = rows(WHOLE[0], recorded(FIRST))
    assert [(row["lane"], row["verified_score"]) for row in found] == [
        (None, 0.5), (0, 1.0), (1, 0.0), (2, None), (0, 1.0),
    ]  # fmt: skip
    assert all(set(row) == set(COLUMNS) for row in found)


def test_exports_of_executions_without_lanes_say_nothing_of_them() -> None:
    document = atif_document(WHOLE[1], recorded(OTHER), "1")
    assert "lanes" not in document["extra"]
    assert document["extra"]["verified_score"] == 0.25
    assert not any(isinstance(event, Forked) for event in OTHER)
