"""What `gyre run show` makes of a run's events: phases, held-out scores, nothing that was not recorded."""

import io
import random
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.cells import cell_len
from rich.console import Console

from opengyre.cli.run_facts import Evaluated, FamilyScore, facts
from opengyre.cli.run_show import (
    COLUMNS,
    FIGURES,
    PHASES,
    held_out_columns,
    held_out_rows,
    markdown_lines,
    parts,
    remarks,
    rows,
    table,
)
from opengyre.proto.base import Event
from opengyre.proto.task import GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.update import Committed, Contributed, UpdateStats
from opengyre.proto.weights import Manifest, WeightsApplied, WeightsPublished

STATS = UpdateStats(
    executions=4, tokens=40, path_tokens=400, unique_tokens=150, busy_s=6.0, logprob_gap_sum=0.4, logprob_gap_tokens=40
)


def admitted(group: str, version: int) -> TaskAdmitted:
    return TaskAdmitted(run="r", task=f"t-{group}", group=group, executions=(f"{group}-e00",), version=version)


def scored(group: str, score: float | None, outcome: Literal["ready", "evaluated"] = "ready") -> GroupScored:
    scores = {} if score is None else {f"{group}-e00": score}
    return GroupScored(
        run="r", task=f"t-{group}", group=group, outcome=outcome, scores=scores, sampled_version_min=0,
        sampled_version_max=0, tokens=9,
    )  # fmt: skip


def contributed(update: int, host: str, attempt: str = "a") -> Contributed:
    return Contributed(
        run="r", update=update, attempt=attempt, host=host, contribution=f"{host}-{attempt}", groups=("g0",),
        gradient="sha256:0", stats=UpdateStats(),
    )  # fmt: skip


def committed(update: int, groups: tuple[str, ...], stats: UpdateStats = STATS) -> Committed:
    return Committed(
        run="r", update=update, attempt="a", version=update, published=True, groups=groups,
        executions=tuple(f"{group}-e00" for group in groups), staleness=(0, 1)[: len(groups)], score=0.5,
        gradient_norm=1.0, stats=stats,
    )  # fmt: skip


def published(version: int) -> WeightsPublished:
    manifest = Manifest(run="r", version=version, parent=None, step=version, directory="/w", files=())
    return WeightsPublished(run="r", manifest=manifest)


def applied(version: int, host: str) -> WeightsApplied:
    return WeightsApplied(run="r", version=version, host=host, boot="b", duration_s=1.0)


LOG: list[tuple[float, Event]] = [
    (100.0, published(0)),
    (101.0, applied(0, "h0")),
    (102.0, admitted("g0", 0)),
    (103.0, admitted("g1", 0)),
    (103.0, admitted("e0", 0)),
    (103.5, admitted("e1", 0)),
    (110.0, scored("e0", 1.0, "evaluated")),
    (112.0, scored("g0", 0.25)),
    (120.0, scored("g1", 0.75)),
    (121.0, contributed(1, "h1", "crashed")),
    (123.0, contributed(1, "h1")),
    (124.0, contributed(1, "h2")),
    (126.0, committed(1, ("g0", "g1"))),
    (127.0, published(1)),
    (130.0, scored("e1", 0.5, "evaluated")),
    (131.0, applied(1, "h0")),
    (150.0, applied(1, "h1")),
]


def test_phases_of_an_update_are_between_what_was_recorded() -> None:
    (row,) = facts("r", LOG).updates
    phases = row.phases
    assert (phases.rollout, phases.commit, phases.weights) == (18.0, 2.0, 5.0)
    assert phases.training == 3.0, "two cells shared six seconds; the attempt that crashed is none of it"
    assert phases.wait == 124.0 - 102.0 - 3.0
    assert row.seconds == 131.0 - 102.0, "the first host that serves it ends it"
    assert (row.gap, row.unique_tokens, row.path_tokens, row.staleness) == (0.01, 150, 400, 0.5)


def test_a_held_out_score_is_of_the_version_that_was_published_at_admission() -> None:
    found = facts("r", [*LOG, (132.0, admitted("e2", 1)), (140.0, scored("e2", 0.25, "evaluated"))])
    assert found.evaluations == (
        Evaluated(version=0, score=0.75, tasks=2, solved=1, overtaken=1),
        Evaluated(version=1, score=0.25, tasks=1),
    )
    assert found.updates[0].held_out == 0.25


def test_the_order_of_events_and_their_repetition_change_nothing() -> None:
    shuffled = LOG * 2
    random.Random(3).shuffle(shuffled)
    assert facts("r", shuffled) == facts("r", LOG)


def test_what_was_not_recorded_is_not_said() -> None:
    quiet = UpdateStats(executions=1)
    (row,) = facts("r", [(5.0, committed(1, ("g0",), quiet))]).updates
    assert (row.gap, row.held_out, row.seconds) == (None, None, None)
    assert (row.phases.rollout, row.phases.wait, row.phases.commit, row.phases.weights) == (None, None, None, None)
    unscored = facts("r", [(1.0, admitted("e", 0)), (2.0, scored("e", None, "evaluated"))])
    assert unscored.evaluations == (Evaluated(version=0, score=None, tasks=0, unscored=1),)


def test_the_table_has_a_cell_for_each_column() -> None:
    (row,) = rows(facts("r", LOG))
    assert row == (
        ["1", "0.500", "-", "1.0e-02", "40", "150", "400", "0.50", "18.0", "3.0", "19.0", "2.0", "5.0", "29.0"]
    )
    assert len(row) == len(COLUMNS)
    assert table(COLUMNS, [row]).row_count == 1


def drawn(columns: Sequence[str], lines: Sequence[Sequence[str]], width: int, cut: int | None = None) -> list[str]:
    """What a terminal of that width shows, a text for each table."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    shown = []
    for part in parts(columns, lines, width, cut):
        with console.capture() as capture:
            console.print(table(*part))
        shown.append(capture.get())
    return shown


def words(shown: Sequence[str]) -> list[list[list[str]]]:
    """Of the lines of each table, but for its rule."""
    return [[line.split() for line in one.splitlines() if line.strip(" \u2500")] for one in shown]


def test_a_terminal_of_80_columns_shows_every_figure_of_an_update() -> None:
    """Its scores were `0…`: fourteen columns shrank until they fitted."""
    lines = [
        ["16", "0.489", "0.487", "5.0e-06", "17704", "117704", "1168440", "0.00", "64.6", "126.6", "65.8", "20.1",
         "8.9", "1111.4"],
        ["17", *["-"] * 13],
    ]  # fmt: skip
    first, second = words(drawn(COLUMNS, lines, 80, len(FIGURES)))
    assert first == [list(FIGURES), lines[0][:8], lines[1][:8]]
    assert second == [["update", *PHASES], ["16", *lines[0][8:]], ["17", *lines[1][8:]]]
    for width in (24, 40, 60, 80, 100, 200):
        shown = drawn(COLUMNS, lines, width, len(FIGURES))
        tables = words(shown)
        assert [name for one in tables for name in one[0][1:]] == list(COLUMNS[1:])
        assert [cell for one in tables for cell in one[1][1:]] == lines[0][1:], width
        assert {one[0][0] for one in tables} == {"update"}
        assert "…" not in "".join(shown)
    assert len(words(drawn(COLUMNS, lines, 200, len(FIGURES)))) == 1


def test_a_table_is_one_where_it_just_fits() -> None:
    (row,) = rows(facts("r", LOG))
    just = max(len(line.rstrip("\n")) for line in drawn(COLUMNS, [row], 500)[0].splitlines())
    assert parts(COLUMNS, [row], just, len(FIGURES)) == [(COLUMNS, [row])]
    assert len(parts(COLUMNS, [row], just - 1, len(FIGURES))) == 2


def test_families_that_do_not_fit_are_in_further_tables() -> None:
    families = [f"family-{number:02}" for number in range(20)] + ["[red]", "漢字", "x" * 90]
    columns = ("version", "score", "solved", *families)
    lines = [[str(version), "0.500", "24", *["0.25"] * len(families)] for version in (0, 16)]
    shown = drawn(columns, lines, 80)
    tables = words(shown)
    assert all(one[0][0] == "version" and one[-1][0] == "16" for one in tables[:-1])
    assert [name for one in tables[:-1] for name in one[0][1:]] == list(columns[1:-1])
    assert [cell for one in tables for cell in one[-1][1:]] == lines[1][1:]
    assert shown[-1].count("x") == 90, "a name that no terminal holds goes on in the next line"
    assert "…" not in "".join(shown)
    assert max(cell_len(line) for one in shown for line in one.splitlines()) <= 80


def submitted(group: str, family: str | None, purpose: Literal["train", "evaluate"] = "evaluate") -> TaskSubmitted:
    spec = TaskSpec(task=f"t-{group}", instruction="", purpose=purpose, family=family)
    return TaskSubmitted(run="r", task=spec.task, spec=spec)


def several(group: str, *scores: float) -> GroupScored:
    found = {f"{group}-e{number:02}": score for number, score in enumerate(scores)}
    return msgspec.structs.replace(scored(group, None, "evaluated"), scores=found)


FAMILIES: list[tuple[float, Event]] = [
    *((1.0 + number / 10, submitted(f"{family[0]}{version}", family)) for version in (0, 4)
      for number, family in enumerate(("write", "rename"))),
    (1.3, submitted("c4", "cut|paste")), (1.4, submitted("n0", None)), (1.5, submitted("g0", "other", "train")),
    (1.6, submitted("z0", "never scored")),
    (2.0, published(0)), *((3.0, admitted(group, 0)) for group in ("w0", "r0", "n0", "g0")),
    (4.0, several("w0", 1.0, 0.5)), (4.0, several("r0", 1.0, 1.0)), (4.0, several("n0", 0.0)), (4.0, scored("g0", 1.0)),
    *((5.0, admitted(group, 4)) for group in ("w4", "r4", "c4", "w4b")),
    (6.0, several("w4", 0.25)), (6.0, several("r4")), (6.0, several("c4", 0.1, 0.2)),
]  # fmt: skip


def test_held_out_tasks_by_family_of_each_version() -> None:
    found = facts("r", FAMILIES)
    assert found.families == ("write", "rename", "cut|paste"), "in the order of submission, those that were scored"
    first, second = found.evaluations
    assert first.families == {"rename": FamilyScore(score=1.0, tasks=1), "write": FamilyScore(score=0.75, tasks=1)}
    assert (first.score, first.tasks, first.solved) == ((0.75 + 1 + 0) / 3, 3, 1), "one execution of two is not solved"
    assert held_out_columns(found) == ("version", "score", "solved", "write", "rename", "cut|paste")
    assert held_out_rows(found) == [
        ["0", "0.583", "1", "0.75", "1.00", "-"],
        ["4", "0.200", "0", "0.25", "-", "0.15"],
    ]
    assert remarks(found) == ["version 0: 3 held-out tasks", "version 4: 2 held-out tasks, 1 without a score"]
    assert markdown_lines(held_out_columns(found), held_out_rows(found)) == [
        r"| version | score | solved | write | rename | cut\|paste |",
        "| --: | --: | --: | --: | --: | --: |",
        "| 0 | 0.583 | 1 | 0.75 | 1.00 | - |",
        "| 4 | 0.200 | 0 | 0.25 | - | 0.15 |",
    ]
    assert second.unscored == 1


def test_tasks_without_families_have_no_columns_of_them() -> None:
    found = facts("r", LOG)
    assert held_out_columns(found) == ("version", "score", "solved")
    assert held_out_rows(found) == [["0", "0.750", "1"]]
    assert remarks(found) == ["version 0: 2 held-out tasks, 1 scored after the next version was published"]
    assert remarks(facts("r", LOG[:-3])) == ["held-out tasks of each version: 1"]
    assert held_out_rows(facts("r", [])) == remarks(facts("r", [])) == []
