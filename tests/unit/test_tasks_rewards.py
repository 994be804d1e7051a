"""Reward files, progress and reports: laws, and what is a fault instead of a zero."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.tasks.errors import TaskError
from opengyre.tasks.reports import Report, Test, merged, read_ctrf, read_junit, read_report
from opengyre.tasks.rewards import enough, over_steps, progress, read_rewards

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(NUMBERS)
def test_one_number_is_the_reward(value: float) -> None:
    assert read_rewards({"reward.txt": f" {value!r}\n".encode()}) == {"reward": value}


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), NUMBERS | st.integers(-9, 9), min_size=1))
def test_an_object_of_numbers_is_read_before_the_text(rewards: dict[str, float]) -> None:
    files = {"reward.json": json.dumps(rewards).encode(), "reward.txt": b"nonsense"}
    assert read_rewards(files) == rewards


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "left no reward.json and no reward.txt"),
        ({"reward.txt": b" \n"}, "reward.txt is empty"),
        ({"reward.txt": b"nan"}, "reward.txt is 'nan'; allowed is one finite number"),
        ({"reward.txt": b"-inf"}, "allowed is one finite number"),
        ({"reward.txt": b"1 2"}, "allowed is one finite number"),
        ({"reward.txt": b"\xff"}, "not UTF-8"),
        ({"reward.txt": b"1" * 100_000}, "has 100000 bytes"),
        ({"reward.json": b"", "reward.txt": b"1"}, "reward.json is empty"),
        ({"reward.json": b"{", "reward.txt": b"1"}, "not valid JSON"),
        ({"reward.json": b"{}", "reward.txt": b"1"}, "no flat object"),
        ({"reward.json": b"[1]"}, "no flat object"),
        ({"reward.json": b'{"a": {"b": 1}}'}, 'a is {"b": 1}; allowed is a finite number'),
        ({"reward.json": b'{"a": true}'}, "a is true"),
        ({"reward.json": b'{"a": NaN}'}, "a is NaN"),
        ({"reward.json": b'{"a": "1"}'}, 'a is "1"'),
        ({"reward.json": b'{"": 1}'}, "printable"),
        ({"reward.json": b'{"a": 1e999}'}, "a is Infinity"),
        ({"reward.json": b"[" * 50_000}, "reward.json"),
    ],
)
def test_what_is_no_reward_is_a_fault(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_rewards(files)
    assert words in str(caught.value)


@given(st.integers(-5, 50), st.integers(0, 50), st.integers(0, 50))
def test_progress_is_between_0_and_1_and_grows(passed: int, total: int, baseline: int) -> None:
    here = progress(passed, total, baseline)
    assert 0.0 <= here <= 1.0
    assert progress(passed + 1, total, baseline) >= here


@given(st.integers(0, 50), st.integers(1, 50))
def test_doing_nothing_is_0_and_everything_1(baseline: int, more: int) -> None:
    total = baseline + more
    assert progress(baseline, total, baseline) == 0.0
    assert progress(total, total, baseline) == 1.0


def test_one_of_eight_that_passes_from_the_start_is_no_progress() -> None:
    assert progress(1, 8, 1) == 0.0
    assert progress(0, 8, 1) == 0.0
    assert math.isclose(progress(2, 8, 1), 1 / 7)


def test_a_step_asks_for_its_least_reward() -> None:
    assert enough({"reward": 0.0}, None)
    assert enough({"reward": 0.5}, 0.5)
    assert not enough({"reward": 0.4}, 0.5)
    assert not enough({"a": 1.0, "b": 0.0}, 0.5)
    assert enough({"a": 1.0, "b": 0.0}, {"a": 1.0})
    assert not enough({"b": 1.0}, {"a": 1.0})


def test_rewards_of_steps_are_the_last_or_the_means() -> None:
    steps = [{"reward": 1.0}, {"reward": 0.5, "style": 1.0}]
    assert over_steps(steps, "final", 2) == {"reward": 0.5, "style": 1.0}
    assert over_steps(steps, "final", 3) == {"reward": 0.0, "style": 0.0}
    assert over_steps(steps, "mean", 2) == {"reward": 0.75, "style": 0.5}
    assert over_steps(steps[:1], "mean", 2) == {"reward": 0.5}


CTRF = {
    "results": {
        "tool": {"name": "pytest"},
        "summary": {"tests": 99, "passed": 99},
        "tests": [
            {"name": "a", "status": "passed", "duration": 1},
            {"name": "b", "status": "failed"},
            {"name": "c", "status": "skipped"},
            {"name": "d", "status": "pending"},
            {"name": "e", "status": "other"},
        ],
    }
}


def test_a_ctrf_report_is_counted_by_its_tests_not_by_its_summary() -> None:
    report = read_ctrf(json.dumps(CTRF).encode())
    assert [test.outcome for test in report.tests] == ["passed", "failed", "skipped", "skipped", "failed"]
    assert (report.passed, report.total) == (1, 3)


def test_a_junit_report_is_read_whatever_its_root() -> None:
    suite = (
        '<testsuite name="s"><testcase classname="m" name="a"/><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><error/></testcase><testcase name="d"><skipped/></testcase></testsuite>'
    )
    for text in (suite, f"<testsuites>{suite}</testsuites>"):
        report = read_junit(text.encode())
        assert [test.name for test in report.tests] == ["m::a", "b", "c", "d"]
        assert (report.passed, report.total) == (1, 3)


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><testsuite><testcase name="&b;"/></testsuite>'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ctrf.json", b"{"),
        ("ctrf.json", b"[]"),
        ("ctrf.json", b'{"results": {}}'),
        ("ctrf.json", b'{"results": {"tests": [{"name": "a"}]}}'),
        ("ctrf.json", b"\xff"),
        ("junit.xml", b"<a>"),
        ("junit.xml", b"<html/>"),
        ("junit.xml", BOMB.encode()),
        ("junit.xml", b""),
    ],
)
def test_what_is_no_report_is_a_fault(name: str, data: bytes) -> None:
    with pytest.raises(TaskError, match=name):
        read_report(name, data)


def test_other_files_are_no_reports() -> None:
    assert read_report("grading.json", b"{}") is None
    assert read_report("test-stdout.txt", b"x") is None


@given(st.binary(max_size=200))
def test_no_bytes_break_the_readers(data: bytes) -> None:
    for read in (read_ctrf, read_junit):
        try:
            read(data)
        except TaskError:
            continue


def test_reports_of_several_runs_are_one() -> None:
    one = Report(tests=(Test(name="a", outcome="passed"),))
    two = Report(tests=(Test(name="a", outcome="failed"),))
    assert (merged([one, two]).passed, merged([one, two]).total) == (1, 2)
