"""The benchmark of the trajectory processor, small: what it makes is what it says, and its rows hold together."""

import msgspec
import pytest
from typer.testing import CliRunner

from opengyre.cli.bench_trajectory_cases import cases, measure, ours
from opengyre.cli.bench_trajectory_events import Ids, calls_of, group
from opengyre.cli.bench_trajectory_load import Shape, execution
from opengyre.cli.bench_trajectory_tree import shortened
from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.trajectory.assemble import assemble
from opengyre.trajectory.tree import paths
from opengyre.trees import build

SMALL = Shape(6_000, 84, sub_agents=3, compactions=2, vocabulary=5_000)


@pytest.mark.parametrize("factor", [1, 2])
def test_a_load_has_the_sub_agents_and_compactions_that_it_says(factor: int) -> None:
    shape = SMALL.times(factor)
    figures = build(execution(shape)).figures
    assert figures.calls == shape.calls
    assert figures.transitions["branch"] == shape.sub_agents
    assert figures.transitions["compaction"] == shape.compactions
    assert figures.unique_nodes == pytest.approx(shape.tokens, rel=0.1)


def test_calls_with_what_is_new_only_make_the_same_tree() -> None:
    calls = list(execution(SMALL))
    assert build(shortened(calls)).figures == build(calls).figures


def test_the_events_of_a_group_make_a_group() -> None:
    (part,) = assemble(event for log in group(0, 2, SMALL) for event in log)
    assert part.ready is not None
    assert part.ready.refused == {}
    sampled = sum(len(call.sampled_ids) for call in calls_of(SMALL, 0, Ids("r", "g", "e")))
    assert [member.trained_tokens for member in part.ready.members] == [sampled, sampled]


def test_no_deduplication_trains_the_same_tokens_in_longer_rows() -> None:
    from opengyre.cli.bench_trajectory_paths import undeduplicated

    calls = calls_of(SMALL, 0, Ids("r", "g", "e"))
    tree, rows = paths(calls), undeduplicated(calls)
    assert sum(s.end - s.start for row in rows for s in row.spans) == tree.trained_tokens
    assert sum(len(row.tokens) for row in rows) == tree.path_tokens > 4 * sum(len(s.tokens) for s in tree.sequences)


def test_ours_trains_what_is_to_be_trained_in_every_case() -> None:
    assert {name: ours(log)[2] for name, (log, _) in cases().items()} == {
        n: wanted for n, (_, wanted) in cases().items()
    }
    assert [row.by for row in measure([])] == ["OpenGyre"] * len(cases())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--parts", "x"], "--parts names 'x'"),
        (["--parts", "others", "--other", "x=y"], "--other is 'x=y'"),
        (["--parts", "others", "--other", "verifiers=/nonexistent"], "/nonexistent is no program; allowed is a Python"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", "trajectory", *arguments])
    assert isinstance(result.exception, StackError)
    assert sentence in str(result.exception) + result.output


def test_the_command_prints_json() -> None:
    result = CliRunner().invoke(app, ["bench", "trajectory", "--parts", "others", "--json"])
    assert result.exit_code == 0, result.output
    facts = msgspec.json.decode(result.output)
    assert {row["case"] for row in facts["others"]} == set(cases())
