"""Deadlines of live groups, on the clock of whoever leads."""

from typing import Any

from opengyre.allocator.deadlines import Deadlines
from opengyre.elastic.admission import new_entry
from opengyre.proto.decision import GroupEntry
from opengyre.proto.run import RunSpec
from opengyre.proto.task import TaskSpec

SPEC = RunSpec(run="r", model="m")


def group(sequence: int, purpose: Any = "train") -> GroupEntry:
    return new_entry(SPEC, TaskSpec(task="t", instruction="x", purpose=purpose), sequence, 0)


def test_a_group_is_named_once_when_it_has_been_live_for_long() -> None:
    deadlines = Deadlines()
    first, second, evaluated = group(0), group(1), group(2, "evaluate")
    assert deadlines.due([first, evaluated], 10, 100.0) == []
    assert deadlines.due([first, second, evaluated], 10, 105.0) == []
    assert deadlines.due([first, second, evaluated], 10, 110.0) == [first]
    assert deadlines.due([first, second, evaluated], 10, 111.0) == []
    assert deadlines.due([second, evaluated], 10, 115.0) == [second]
    assert deadlines.due([second], None, 1e9) == []
