"""``task.yaml`` of Terminal-Bench 1, and what pytest prints in its runs. Pure.

Its tests write no reward file: the score is read from pytest's short summary, which ``-rA`` prints.
"""

import re
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opengyre.tasks.config import Positive, sentence
from opengyre.tasks.errors import TaskError
from opengyre.tasks.reports import Outcome, Report, Test

_SUMMARY = re.compile(r"=+ short test summary info =+")
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*)$")
_OUTCOMES: dict[str, Outcome] = {"PASSED": "passed", "XPASS": "passed", "FAILED": "failed", "ERROR": "failed"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PARAMETERS = re.compile(r"\s+-\s.*$")


class BenchConfig(BaseModel):
    """All of ``task.yaml``; times in seconds unless their names say minutes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instruction: str = Field(min_length=1)
    author_name: str = "unknown"
    author_email: str = "unknown"
    difficulty: Literal["easy", "medium", "hard", "unknown"] = "unknown"
    category: str = "software_engineering"
    tags: tuple[str, ...] = ()
    parser_name: str = "pytest"
    max_agent_timeout_sec: Positive = 360.0
    max_test_timeout_sec: Positive = 60.0
    run_tests_in_same_shell: bool = False
    disable_asciinema: bool = False
    estimated_duration_sec: float | None = None
    expert_time_estimate_min: float | None = None
    junior_time_estimate_min: float | None = None


def read_bench_config(text: str, place: str = "task.yaml") -> BenchConfig:
    """The configuration that a file says; raises `TaskError`."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TaskError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise TaskError(f"{place} holds no mapping; allowed is one with instruction and the fields of Terminal-Bench")
    try:
        found = BenchConfig.model_validate(document)
    except ValidationError as error:
        raise TaskError(sentence(place, error)) from error
    if found.parser_name != "pytest":
        raise TaskError(f"{place}: parser_name is {found.parser_name!r}; allowed is 'pytest'")
    return found


def read_pytest_summary(output: str) -> Report:
    """The tests that pytest's last short summary names; raises `TaskError` where there is none."""
    plain = _COLOUR.sub("", output)
    ends = [found.end() for found in _SUMMARY.finditer(plain)]
    if not ends:
        raise TaskError("the tests printed no short summary of pytest; allowed is a run with -rA")
    tests = []
    for line in plain[ends[-1] :].splitlines():
        found = _LINE.match(line.strip())
        if found is None:
            continue
        # A failure's message may name anything; the test's name ends before it.
        name = _PARAMETERS.sub("", found[2]) if found[1] in ("FAILED", "ERROR") else found[2]
        outcome = _OUTCOMES.get(found[1], "skipped")
        tests.append(Test(name=name, outcome=outcome))
    if not tests:
        raise TaskError("pytest's short summary names no test; allowed is a run with -rA")
    return Report(tests=tuple(tests))
