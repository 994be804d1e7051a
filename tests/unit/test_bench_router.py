"""`gyre bench router`, what it says of what was measured, and which options it refuses."""

import pytest
from typer.testing import CliRunner

from opengyre.cli.bench_processes import last_said, processor_s
from opengyre.cli.bench_router import stage_table
from opengyre.cli.bench_router_facts import WAY, Block, Turn, facts, read_spans
from opengyre.cli.bench_router_talk import lengths
from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.rollout.spans import add, spans, stage, written
from opengyre.shared.settings import SettingsError


def block(way: str, concurrency: int, seconds: float, *turns: Turn) -> Block:
    return Block(way, concurrency, seconds, turns, {"rollout": 0.01 * len(turns), "host": 0.0})


def via(seconds: float, engine: float) -> Turn:
    return Turn(seconds, 100, 10, {"render": 0.001, "engine": engine})


def test_overhead_is_of_blocks_that_alternated() -> None:
    blocks = [
        block("direct", 1, 0.1, Turn(0.100, 100, 10)),
        block("via", 1, 0.125, via(0.104, 0.099)),
        block("via", 1, 0.1, via(0.104, 0.101)),
        block("direct", 1, 0.1, Turn(0.100, 100, 10)),
    ]
    found = facts("tiny", 2, 0, blocks)
    [overhead] = found.overheads
    assert (overhead.median_ms, overhead.p99_ms) == (4.0, 4.0)
    assert overhead.throughput_ratio == pytest.approx(0.2 / 0.225, abs=1e-3)
    assert overhead.pairs == (0.8, 0.9, 1.0)
    assert overhead.around_engine.median_ms in (3.0, 5.0)
    stages = {one.name: one.alone.median_ms for one in found.stages}
    assert list(stages) == ["render", "engine", WAY]
    assert stages[WAY] in (2.0, 4.0)
    row = next(row for row in found.rows if row.way == "via")
    assert (row.calls, row.prompt_tokens, row.processor_ms["rollout"]) == (2, 100, 10.0)


def test_spans_are_read_as_they_are_written() -> None:
    with spans() as found:
        with stage("render"):
            add("engine", 0.25)
        add("engine", 0.5)
    add("engine", 9.0)  # of no request
    assert read_spans(written(found)) == {"render": pytest.approx(found["render"], abs=1e-6), "engine": 0.75}
    assert read_spans("") == {}


def test_turns_are_as_long_by_each_way_and_on_average_as_asked() -> None:
    drawn = [length for client in range(40) for length in lengths(32, client, 8)]
    assert drawn == [length for client in range(40) for length in lengths(32, client, 8)]
    assert 16 <= min(drawn) < max(drawn) <= 48
    assert sum(drawn) / len(drawn) == pytest.approx(32, rel=0.1)


def test_a_process_that_has_ended_takes_no_time() -> None:
    assert processor_s([1 << 30]) == 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--concurrency", "1,x"), "--concurrency names 'x'; allowed: whole numbers from 1 to 64"),
        (("--concurrency", "0,8"), "--concurrency names '0'; allowed: whole numbers from 1 to 64"),
        (("--turns", "90"), "--turns is 90; with --tokens 32 and --engine emulated allowed are up to 33"),
        (("--engine", "tiny", "--tokens", "300"), "--tokens is 300; with --engine tiny allowed are up to 226"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(arguments: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(app, ["bench", "router", *arguments])
    assert isinstance(done.exception, StackError)
    assert sentence in str(done.exception)


def test_settings_are_checked_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_HOST__VLLM_DTYPE", "int3")
    done = CliRunner().invoke(app, ["bench", "router", "--engine", "vllm"])
    assert isinstance(done.exception, SettingsError)
    assert "setting host.vllm_dtype is 'int3'" in str(done.exception)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("host: setting host.vllm_dtype is 'int3'", "host: setting host.vllm_dtype is 'int3'"),
        ('{"event": "no port is free", "level": "error"}', "no port is free"),
        ('{"level": "error"}', '{"level": "error"}'),
        ("[1]", "[1]"),
        ("{", "{"),
    ],
)
def test_the_last_that_a_program_said_is_a_sentence(line: str, said: str) -> None:
    assert last_said(line) == said


def test_with_one_concurrency_each_stage_has_one_time() -> None:
    one = [block("direct", 4, 0.1, Turn(0.1, 100, 10)), block("via", 4, 0.1, via(0.104, 0.099))]
    more = [block("direct", 8, 0.1, Turn(0.1, 100, 10)), block("via", 8, 0.1, via(0.104, 0.099))]

    def columns(*blocks: Block) -> list[str]:
        return [str(column.header) for column in stage_table(facts("tiny", 2, 0, blocks)).columns]

    assert columns(*one) == ["stage", "", "ms, 4 at a time"]
    assert columns(*one, *more) == ["stage", "", "alone ms", "crowded ms"]
