"""Reports of tests: CTRF (JSON) and JUnit (XML), as the parts of an evaluation. Pure.

Reports come out of sandboxes, so they are read as what anybody may have written: bounded, without entities, and never
trusted for more than names and outcomes.
"""

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from defusedxml import DefusedXmlException, ElementTree

from opengyre.tasks.errors import TaskError

MAX_TESTS = 100_000
MAX_NAME = 300

Outcome = Literal["passed", "failed", "skipped"]


class Test(msgspec.Struct, frozen=True, kw_only=True):
    """One test of a report."""

    __test__ = False  # pytest collects classes of this name

    name: str
    outcome: Outcome


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Every test of a run."""

    tests: tuple[Test, ...] = ()

    @property
    def passed(self) -> int:
        return sum(test.outcome == "passed" for test in self.tests)

    @property
    def total(self) -> int:
        """Tests that ran: those that were skipped say nothing."""
        return sum(test.outcome != "skipped" for test in self.tests)


def merged(reports: Iterable[Report]) -> Report:
    """All tests of several runs."""
    return Report(tests=tuple(test for report in reports for test in report.tests)[:MAX_TESTS])


def _clipped(name: str) -> str:
    return name.encode("utf-8", "replace").decode()[:MAX_NAME]


def read_ctrf(data: bytes, place: str = "ctrf.json") -> Report:
    """A report of the Common Test Report Format; raises `TaskError`.

    ``pending`` is skipped as well; ``other`` is neither passed nor skipped.
    """
    try:
        document = json.loads(data)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TaskError(f"{place} is not JSON: {error}") from error
    results = document.get("results") if isinstance(document, dict) else None
    found = results.get("tests") if isinstance(results, dict) else None
    if not isinstance(found, list):
        raise TaskError(f"{place} has no results.tests; allowed is a report of the Common Test Report Format")
    return Report(tests=tuple(_ctrf_test(test, number, place) for number, test in enumerate(found[:MAX_TESTS])))


def _ctrf_test(test: Any, number: int, place: str) -> Test:
    status = test.get("status") if isinstance(test, dict) else None
    name = test.get("name") if isinstance(test, dict) else None
    if not isinstance(status, str) or not isinstance(name, str):
        raise TaskError(f"{place}: results.tests.{number} has no name and status")
    outcome: Outcome = "passed" if status == "passed" else "skipped" if status in ("skipped", "pending") else "failed"
    return Test(name=_clipped(name), outcome=outcome)


def read_junit(data: bytes, place: str = "junit.xml") -> Report:
    """A report in JUnit's XML; raises `TaskError`."""
    try:
        root = ElementTree.fromstring(data, forbid_dtd=True)
    except (DefusedXmlException, ElementTree.ParseError, ValueError, LookupError, RecursionError) as error:
        raise TaskError(f"{place} is no XML that is read here: {error}") from error
    if root.tag.rpartition("}")[2] not in ("testsuites", "testsuite"):
        raise TaskError(f"{place} begins with {root.tag[:80]!r}; allowed are testsuites and testsuite")
    tests = []
    for case in root.iter():
        if case.tag.rpartition("}")[2] != "testcase" or len(tests) >= MAX_TESTS:
            continue
        kinds = {child.tag.rpartition("}")[2] for child in case}
        outcome: Outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        tests.append(Test(name=_clipped(name or "?"), outcome=outcome))
    return Report(tests=tuple(tests))


def read_report(name: str, data: bytes) -> Report | None:
    """The report that a file of this name holds; None where such a name is no report. Raises `TaskError`."""
    base = name.rpartition("/")[2].lower()
    if base.endswith(".json") and "ctrf" in base:
        return read_ctrf(data, name)
    if base.endswith(".xml") and ("junit" in base or "report" in base or "results" in base):
        return read_junit(data, name)
    return None
