"""Selections of messages and how they are shown: no I/O."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.cli.stream_lines import digest, line, record
from opengyre.cli.stream_replay import paced
from opengyre.cli.stream_select import Selection, SelectionError, select, since_time
from opengyre.proto import subjects
from opengyre.shared.bus import Stored

NOW = datetime.datetime(2030, 1, 31, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"stream": "traj"}, "gyre.v1.traj.>"),
        ({"stream": "TRAJ", "run": "r"}, "gyre.v1.traj.r.*.*.*"),
        ({"stream": "TRAJ", "group": "r-g000001"}, "gyre.v1.traj.r.r-g000001.*.*"),
        ({"stream": "TRAJ", "execution": "r-g000001-e02"}, "gyre.v1.traj.r.r-g000001.r-g000001-e02.*"),
        ({"stream": "TASKS", "run": "r"}, "gyre.v1.task.r.>"),
        ({"stream": "EPISODES", "run": "r"}, "gyre.v1.episode.r.>"),
        ({"stream": "DECISIONS", "run": "r"}, "gyre.v1.decision.r"),
        ({"stream": "HOSTS"}, "gyre.v1.host.>"),
        ({"stream": "TASKS", "subject": "gyre.v1.task.*.t1.>"}, "gyre.v1.task.*.t1.>"),
    ],
)
def test_a_selection_is_a_subject(options: dict[str, str], subject: str) -> None:
    assert select(**options).subject == subject


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stream": "NOPE"}, "there is no stream NOPE; there are: TASKS"),
        ({"stream": "HOSTS", "run": "r"}, "HOSTS is not of a run; allowed"),
        ({"stream": "TASKS", "run": "a.b"}, "run 'a.b' is not allowed"),
        ({"stream": "TASKS", "group": "r-*"}, "group 'r-\\*' is not allowed"),
        ({"stream": "TASKS", "subject": "gyre.v1.traj.>"}, "not in stream TASKS"),
        ({"stream": "TASKS", "subject": "a b"}, "subject 'a b' is not allowed"),
        ({"stream": "TASKS", "subject": "gyre.v1.task.>", "run": "r"}, "one of the two"),
    ],
)
def test_a_selection_that_means_nothing_is_one_sentence(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        select(**options)


def test_where_subjects_hold_no_group_the_payload_decides() -> None:
    selection = select("TASKS", group="r-g000001")
    assert selection.takes(b'{"type":"task.admitted.v1","group":"r-g000001"}')
    assert not selection.takes(b'{"group":"r-g000002"}')
    assert not selection.takes(b'{"task":"t"}')
    assert not selection.takes(b"no json")
    assert Selection("TASKS", ">").takes(b"no json")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400), ("2030-01-31T11:00", 3600)]
)
def test_since_is_an_age_or_a_time(text: str, seconds: int) -> None:
    assert NOW - since_time(text, NOW) == datetime.timedelta(seconds=seconds)


@given(st.text(max_size=12))
def test_any_other_since_is_a_time_or_refused(text: str) -> None:
    with contextlib.suppress(SelectionError):
        assert since_time(text, NOW).tzinfo is not None


@given(st.binary(max_size=64))
def test_a_record_holds_the_payload_and_is_json(payload: bytes) -> None:
    stored = Stored(subject="gyre.v1.task.r.t.submitted", sequence=7, payload=payload, timestamp=1.5)
    document = msgspec.json.decode(msgspec.json.encode(record(subjects.TASKS, stored)))
    assert (document["stream"], document["sequence"], document["time"]) == ("TASKS", 7, 1.5)
    try:
        assert document["event"] == msgspec.json.decode(payload)
    except msgspec.DecodeError:
        assert document["event"] == payload.decode("utf-8", "replace")


@given(st.binary(max_size=200), st.integers(1, 100))
def test_a_line_is_one_line_of_the_width(payload: bytes, width: int) -> None:
    text = line(Stored(subject="gyre.v1.task.r.t.submitted", sequence=7, payload=payload), width)
    assert len(text) <= width
    assert text.isprintable()


def test_a_digest_begins_with_the_type_and_shortens_long_lists() -> None:
    payload = msgspec.json.encode({"type": "traj.call.v1", "prompt_ids": list(range(40)), "text": "a b"})
    assert digest(payload) == "traj.call.v1 prompt_ids=[40] text='a b'"


@pytest.mark.parametrize("payload", [b"[" * 7_000_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900])
def test_a_message_that_is_nested_too_deeply_is_shown_and_recorded(payload: bytes) -> None:
    stored = Stored(subject="gyre.v1.traj.r.g.e.call", sequence=7, payload=payload)
    assert len(line(stored, 120)) == 120
    assert msgspec.json.encode(record(subjects.TRAJ, stored)).count(b"\n") == 0
    assert not select("TASKS", group="r-g000001").takes(payload)


def test_a_record_of_a_message_of_several_lines_is_one_line() -> None:
    stored = Stored(subject="gyre.v1.traj.r.g.e.call", sequence=7, payload=b'{\n "a": "b\\nc"\n}')
    text = msgspec.json.encode(record(subjects.TRAJ, stored))
    assert b"\n" not in text
    assert msgspec.json.decode(text)["event"] == {"a": "b\nc"}


async def test_a_replay_keeps_the_recorded_pace() -> None:
    loop = asyncio.get_running_loop()

    async def recorded() -> AsyncIterator[Stored]:
        for number, when in enumerate((100.0, 101.0, 103.0)):
            yield Stored(subject="s", sequence=number, payload=b"{}", timestamp=when)

    async def gaps(speed: float | None) -> list[float]:
        times = [loop.time() async for _ in paced(recorded(), speed)]
        return [time - times[0] for time in times]

    at_ten = await gaps(10)
    assert 0.1 <= at_ten[1] < 0.2
    assert 0.3 <= at_ten[2] < 0.5
    assert (await gaps(None))[2] < 0.05
