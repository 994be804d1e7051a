"""Which messages of a stream are meant: by subject, run, group, execution, time. Pure."""

import datetime
import re
from dataclasses import dataclass

import msgspec

from opengyre.cli.stack import StackError
from opengyre.proto import subjects
from opengyre.proto.ids import BadIdentifierError, check_run, check_token, group_of, run_of

QUEUES = (subjects.EPISODES, subjects.GROUPS)
"""Streams that take no second reader: their messages are looked at one by one."""
BY_RUN = {
    subjects.TASKS: "task", subjects.EPISODES: "episode", subjects.TRAJ: "traj", subjects.GROUPS: "group",
    subjects.UPDATES: "update", subjects.WEIGHTS: "weights",
}  # fmt: skip
"""Streams whose subjects have the run as their third token."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class SelectionError(StackError):
    """A selection that means nothing; one sentence."""


class _Ids(msgspec.Struct):
    group: str | None = None
    execution: str | None = None


_ids = msgspec.json.Decoder(_Ids)


@dataclass(frozen=True)
class Selection:
    """A stream's messages under `subject`, of `group` and `execution` where these are named."""

    stream: str
    subject: str
    group: str | None = None
    execution: str | None = None

    def takes(self, payload: bytes) -> bool:
        """Whether a message under the subject is meant; what cannot be read is, unless a group is named."""
        if self.group is None and self.execution is None:
            return True
        try:
            ids = _ids.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return False
        return self.group in (None, ids.group) and self.execution in (None, ids.execution)


def stream_name(name: str) -> str:
    """The stream's name in capitals; raises `SelectionError` naming those there are."""
    if name.upper() not in subjects.STREAM_SUBJECTS:
        raise SelectionError(f"there is no stream {name}; there are: {', '.join(subjects.STREAM_SUBJECTS)}")
    return name.upper()


def select(
    stream: str,
    subject: str | None = None,
    run: str | None = None,
    group: str | None = None,
    execution: str | None = None,
) -> Selection:
    """What the options of `gyre stream` mean; an execution names its group, a group its run."""
    stream = stream_name(stream)
    if execution is not None:
        group = group or group_of(execution)
    if group is not None:
        run = run or run_of(group)
    _check_ids(run, group, execution)
    if subject is not None:
        if run is not None:
            raise SelectionError("--subject is given beside --run, --group or --execution; allowed is one of the two")
        return Selection(stream, _checked(stream, subject))
    everything = subjects.STREAM_SUBJECTS[stream][0]
    if run is None:
        return Selection(stream, everything if stream != subjects.ADVISORY else ">")
    if stream == subjects.TRAJ:
        return Selection(stream, subjects.traj(run, group or "*", execution or "*", "*"))
    if stream == subjects.DECISIONS:
        return Selection(stream, subjects.decision(run), group, execution)
    if stream not in BY_RUN:
        raise SelectionError(
            f"stream {stream} is not of a run; allowed with --run are {', '.join([*BY_RUN, 'DECISIONS'])}"
        )
    return Selection(stream, f"{subjects.PREFIX}.{BY_RUN[stream]}.{run}.>", group, execution)


def _check_ids(run: str | None, group: str | None, execution: str | None) -> None:
    try:
        if group is not None:
            check_token("group", group)
        if execution is not None:
            check_token("execution", execution)
        if run is not None:
            check_run(run)
    except BadIdentifierError as error:
        raise SelectionError(str(error)) from error


def _checked(stream: str, subject: str) -> str:
    if not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", subject):
        raise SelectionError(
            f"subject {subject!r} is not allowed: tokens separated by dots, * for one and > for the rest"
        )
    root = subjects.STREAM_SUBJECTS[stream][0].removesuffix(".>")
    if stream != subjects.ADVISORY and subject != ">" and not subject.startswith(f"{root}."):
        raise SelectionError(f"subject {subject} is not in stream {stream}, whose subjects begin with {root}.")
    return subject


def since_time(text: str, now: datetime.datetime) -> datetime.datetime:
    """`10m`, `2h`, `30s`, `1d` before `now`, or a date and time of ISO 8601 (UTC if it says no zone)."""
    if found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", text):
        try:
            return now - datetime.timedelta(seconds=float(found[1]) * UNITS[found[2]])
        except OverflowError as error:
            raise SelectionError(f"since is {text!r}, which is before all time") from error
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise SelectionError(
            f"since is {text!r}; allowed are 30s, 10m, 2h, 1d or a time like 2030-01-31T12:00"
        ) from error
    return when if when.tzinfo is not None else when.replace(tzinfo=datetime.UTC)
