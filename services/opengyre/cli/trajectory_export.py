"""`gyre trajectory export`: executions of the TRAJ stream as ATIF or Parquet, one execution in memory at a time.

Awaits: the broker, within the bounds of reading a stream.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from opengyre.cli.stack import StackError
from opengyre.cli.stream_replay import replacing
from opengyre.cli.stream_select import SelectionError
from opengyre.formats.export import COLUMNS, Recorded, atif_document, rows
from opengyre.proto import codec, subjects
from opengyre.proto.ids import BadIdentifierError, check_run, check_token, group_of, run_of
from opengyre.shared.blobs import Blobs
from opengyre.shared.bulk import fill
from opengyre.shared.bus import Bus, read

NEEDED = "--format {} needs the library {}: pip install 'opengyre[formats]'"
ROWS = 4096
"""Rows of a table that are written at once."""
TOKENS = 8_000_000
"""Tokens of rows that are written at once."""


class Writer(Protocol):
    """Takes one execution after another."""

    def take(self, execution: str, log: list[Recorded]) -> int:
        """Write it; returns how many calls it has."""
        ...


async def export(
    bus: Bus, blobs: Blobs, execution: str | None, run: str | None, out: Path, opened: Callable[[BinaryIO, bool], Any]
) -> tuple[int, int]:
    """Write an execution, or all of a run, by the writer that `opened` gives; returns executions and calls."""
    names = [name async for name in _executions(bus, execution, run)]
    if not names:
        wanted = f"execution {execution}" if execution is not None else f"run {run}"
        raise StackError(f"there is nothing of {wanted} in the stream TRAJ; gyre stream view TRAJ shows what there is")
    calls = 0
    with replacing(out) as file, opened(file, execution is not None) as writer:
        for name in names:
            calls += writer.take(name, await _log(bus, blobs, name))
    return len(names), calls


async def _executions(bus: Bus, execution: str | None, run: str | None) -> AsyncIterator[str]:
    if (execution is None) == (run is None):
        raise SelectionError("an execution or --run is needed; allowed is one of the two")
    try:
        if execution is not None:
            check_token("execution", execution)
            scope = subjects.traj(run_of(execution), group_of(execution), execution, "*")
        else:
            scope = subjects.traj(check_run(run or ""), "*", "*", "started")
    except BadIdentifierError as error:
        raise SelectionError(str(error)) from error
    found = await bus.subjects(subjects.TRAJ, scope)
    for name in sorted({subject.split(".")[-2] for subject in found}):
        yield name


async def _log(bus: Bus, blobs: Blobs, execution: str) -> list[Recorded]:
    group = group_of(execution)
    stored = await read(bus, subjects.TRAJ, subjects.traj(run_of(group), group, execution, "*"))
    found: list[Recorded] = []
    for message in stored:
        # What cannot be decoded is left out here as it is by the processor, which refuses the execution for it.
        with contextlib.suppress(codec.UndecodableError):
            found.append(Recorded(message.timestamp, message.event()))
    filled = await fill(blobs.get, [one.event for one in found])
    return [Recorded(one.time, event) for one, event in zip(found, filled, strict=True)]


class _Atif:
    def __init__(self, out: BinaryIO, single: bool, check: Callable[[Any], Any]) -> None:
        self._out, self._single, self._check = out, single, check

    def take(self, execution: str, log: list[Recorded]) -> int:
        document = self._check(atif_document(execution, log, version("opengyre")))
        data = msgspec.json.encode(document)
        self._out.write(msgspec.json.format(data, indent=2) if self._single else data)
        self._out.write(b"\n")
        return sum(step["source"] == "agent" for step in document["steps"])


@contextlib.contextmanager
def atif(out: BinaryIO, single: bool) -> Iterator[Writer]:
    """One document, or one a line; each is checked by the format's own models."""
    try:
        from atif import Trajectory
    except ImportError as error:
        raise StackError(NEEDED.format("atif", "atif")) from error
    yield _Atif(out, single, lambda document: Trajectory.model_validate(document).to_json_dict())


class _Parquet:
    def __init__(self, arrow: Any, schema: Any, writer: Any) -> None:
        self._arrow, self._schema, self._writer = arrow, schema, writer
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def take(self, execution: str, log: list[Recorded]) -> int:
        found = rows(execution, log)
        for row in found:
            self._rows.append(row)
            self._tokens += len(row["prompt_ids"]) + len(row["sampled_ids"])
            if len(self._rows) >= ROWS or self._tokens >= TOKENS:
                self.flush()
        return len(found)

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, self._schema))
        self._rows, self._tokens = [], 0


@contextlib.contextmanager
def parquet(out: BinaryIO, _single: bool) -> Iterator[Writer]:
    """A table with one row a call."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise StackError(NEEDED.format("parquet", "pyarrow")) from error
    kinds = {"list<int32>": pyarrow.int32(), "list<int64>": pyarrow.int64(), "list<float64>": pyarrow.float64()}
    kinds["list<string>"] = pyarrow.string()
    schema = pyarrow.schema(
        [(name, pyarrow.list_(kinds[kind]) if kind in kinds else kind) for name, kind in COLUMNS.items()]
    )
    with ParquetWriter(out, schema, compression="zstd") as writer:
        table = _Parquet(pyarrow, schema, writer)
        yield table
        table.flush()


WRITERS: dict[str, Callable[[BinaryIO, bool], Any]] = {"atif": atif, "parquet": parquet}
