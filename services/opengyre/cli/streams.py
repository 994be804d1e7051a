"""`gyre stream`: the streams, where the `nats` CLI is not at hand."""

import asyncio
import contextlib
import datetime
import shutil
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer
from rich.table import Table

from opengyre.cli import stream_dlq
from opengyre.cli.client import JsonOption, StateDirOption, console, errors, show_json
from opengyre.cli.stack import StackError
from opengyre.cli.stream_lines import line, record
from opengyre.cli.stream_read import connected, first_since, read_live, read_past
from opengyre.cli.stream_replay import paced, to_file, to_processor, to_terminal
from opengyre.cli.stream_select import Selection, SelectionError, select, since_time, stream_name
from opengyre.proto import subjects
from opengyre.shared.bus import Bus, BusError, Stored, reachable

T = TypeVar("T")
NatsOption = Annotated[str | None, typer.Option("--nats", help="URL of NATS; default: the stack's, or bus.url.")]
StreamArgument = Annotated[str, typer.Argument(help="A stream; `gyre stream ls` lists them.")]
SubjectOption = Annotated[str | None, typer.Option("--subject", help="Subjects; * is one token, > the rest.")]
RunOption = Annotated[str | None, typer.Option("--run", help="Only of this run.")]
GroupOption = Annotated[str | None, typer.Option("--group", help="Only of this group.")]
ExecutionOption = Annotated[str | None, typer.Option("--execution", help="Only of this execution.")]
FullOption = Annotated[bool, typer.Option("--full", help="Do not cut lines at the terminal's width.")]


def register(app: typer.Typer) -> None:
    streams = typer.Typer(name="stream", help="Read and replay the streams.", no_args_is_help=True)
    for command in (ls, view, tail, replay):
        streams.command()(command)
    letters = typer.Typer(name="dlq", help="Dead letters: messages that were given up.", no_args_is_help=True)
    letters.command("ls")(dlq_ls)
    letters.command("show")(dlq_show)
    letters.command("requeue")(dlq_requeue)
    letters.command("drop")(dlq_drop)
    streams.add_typer(letters)
    app.add_typer(streams)


def run_bounded(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; faults of the bus become one sentence."""
    try:
        return asyncio.run(work)
    except BusError as error:
        raise StackError(str(error)) from error


def ls(nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False) -> None:
    """List the streams and how much is in them.

    Example: gyre stream ls
    """

    async def work() -> list[dict[str, Any]]:
        async with connected(nats, state_dir) as bus:
            return [await _facts(bus, name) for name in subjects.STREAM_SUBJECTS]

    rows = run_bounded(work())
    if json:
        show_json(rows)
        return
    table = Table("stream", "subjects", "messages", "bytes", "first", "last", "consumers")
    for row in rows:
        figures = (str(row[name]) for name in ("messages", "bytes", "first", "last", "consumers"))
        table.add_row(row["stream"], " ".join(row["subjects"]), *figures)
    console.print(table)


async def _facts(bus: Bus, name: str) -> dict[str, Any]:
    async with reachable(bus):
        state = (await bus.stream_info(name)).state
    return {
        "stream": name,
        "subjects": subjects.STREAM_SUBJECTS[name],
        "messages": state.messages,
        "bytes": state.bytes,
        "first": state.first_seq,
        "last": state.last_seq,
        "consumers": state.consumer_count,
    }


def _shower(stream: str, json: bool, full: bool) -> Any:
    width = None if full or not console.is_terminal else shutil.get_terminal_size().columns

    def show(stored: Stored) -> None:
        if json:
            show_json(record(stream, stored))
        else:
            print(line(stored, width))
        sys.stdout.flush()

    return show


def _since(text: str | None) -> datetime.datetime | None:
    return None if text is None else since_time(text, datetime.datetime.now(datetime.UTC))


def view(
    stream: StreamArgument,
    subject: SubjectOption = None,
    run: RunOption = None,
    group: GroupOption = None,
    execution: ExecutionOption = None,
    since: Annotated[str | None, typer.Option(help="30s, 10m, 2h, 1d ago, or a time of ISO 8601.")] = None,
    start: Annotated[int, typer.Option(min=1, help="First sequence.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 100,
    full: FullOption = False,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show what is in a stream, oldest first.

    Example: gyre stream view TRAJ --execution demo-g000003-e01
    """
    selection, after = select(stream, subject, run, group, execution), _since(since)

    async def work() -> None:
        show, shown = _shower(selection.stream, json, full), 0
        async with connected(nats, state_dir) as bus, _past(bus, selection, after, start) as messages:
            async for stored in messages:
                if shown == limit:
                    errors.print(f"there are more: --start {stored.sequence}")
                    return
                show(stored)
                shown += 1
            if not shown:
                errors.print(f"no message of {selection.stream} matches")

    run_bounded(work())


@contextlib.asynccontextmanager
async def _past(
    bus: Bus, selection: Selection, since: datetime.datetime | None, start: int
) -> AsyncIterator[AsyncIterator[Stored]]:
    begin = await first_since(bus, selection, since, start)
    when = since.timestamp() if since is not None else 0.0
    async with contextlib.aclosing(read_past(bus, selection, begin, when)) as messages:
        yield messages


def tail(
    stream: StreamArgument,
    subject: SubjectOption = None,
    run: RunOption = None,
    group: GroupOption = None,
    execution: ExecutionOption = None,
    start: Annotated[int | None, typer.Option(min=1, help="First sequence; default: what comes from now on.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    full: FullOption = False,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Follow a stream until Ctrl-C.

    Example: gyre stream tail UPDATES --run demo
    """
    selection = select(stream, subject, run, group, execution)

    async def work() -> None:
        show, shown = _shower(selection.stream, json, full), 0
        async with (
            connected(nats, state_dir) as bus,
            contextlib.aclosing(read_live(bus, selection, start)) as messages,
        ):
            async for stored in messages:
                show(stored)
                shown += 1
                if shown == limit:
                    return

    with contextlib.suppress(KeyboardInterrupt):
        run_bounded(work())


def replay(
    stream: Annotated[str, typer.Argument(help="A stream.")] = subjects.TRAJ,
    subject: SubjectOption = None,
    run: RunOption = None,
    group: GroupOption = None,
    execution: ExecutionOption = None,
    since: Annotated[str | None, typer.Option(help="30s, 10m, 2h, 1d ago, or a time of ISO 8601.")] = None,
    start: Annotated[int, typer.Option(min=1, help="First sequence.")] = 1,
    original: Annotated[bool, typer.Option("--original", help="With the intervals in which it happened.")] = False,
    speed: Annotated[float | None, typer.Option(min=0.001, help="So many times as fast as it happened.")] = None,
    out: Annotated[Path | None, typer.Option(help="Into a file of JSON lines.")] = None,
    into: Annotated[Literal["processor"] | None, typer.Option(help="Into a fresh trajectory processor.")] = None,
    full: FullOption = False,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Replay a stream, as fast as possible or in time, to the terminal, a file or a fresh processor.

    Example: gyre stream replay TRAJ --run demo --into processor
    """
    if original and speed is not None:
        raise SelectionError("--original and --speed are given; allowed is one of the two")
    if out is not None and into is not None:
        raise SelectionError("--out and --into are given; allowed is one of the two")
    if into is not None and stream_name(stream) != subjects.TRAJ:
        raise SelectionError(f"--into processor reads the stream TRAJ, not {stream}")
    selection, after = select(stream, subject, run, group, execution), _since(since)
    pace = 1.0 if original else speed

    async def work() -> int:
        async with connected(nats, state_dir) as bus, _past(bus, selection, after, start) as messages:
            again = paced(messages, pace)
            if into is not None:
                return await to_processor(again, sys.stdout.buffer, state_dir)
            if out is not None:
                return await to_file(again, selection.stream, out)
            return await to_terminal(again, _shower(selection.stream, json, full))

    try:
        count = run_bounded(work())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    errors.print(f"{count} messages of {selection.stream} were replayed")


Sequence = Annotated[int, typer.Argument(min=1, help="Sequence of the letter; `gyre stream dlq ls` lists them.")]


def dlq_ls(
    stream: Annotated[str | None, typer.Option(help="Only of this stream.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the dead letters, oldest first.

    Example: gyre stream dlq ls
    """
    origin = stream_name(stream) if stream is not None else None

    async def work() -> list[stream_dlq.Letter]:
        async with connected(nats, state_dir) as bus:
            return await stream_dlq.letters(bus, origin, limit)

    found = run_bounded(work())
    if json:
        show_json(found)
        return
    table = Table("letter", "from", "sequence", "consumer", "deliveries", "error")
    for one in found:
        letter = one.letter
        table.add_row(
            *(str(one.sequence), letter.origin_stream, str(letter.origin_sequence), letter.consumer),
            *(str(letter.deliveries), letter.error.replace("[", "\\[")),
        )
    console.print(table)


def dlq_show(
    sequence: Sequence, nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Show a dead letter with its message.

    Example: gyre stream dlq show 3
    """

    async def work() -> stream_dlq.Letter:
        async with connected(nats, state_dir) as bus:
            return await stream_dlq.letter_at(bus, sequence)

    found = run_bounded(work())
    if json:
        show_json(found)
        return
    for name, value in msgspec.to_builtins(found.letter).items():
        console.print(f"{name}: {value}", markup=False)


def dlq_requeue(
    sequence: Sequence, nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Store a dead letter's message again under its subject, and drop the letter.

    Example: gyre stream dlq requeue 3
    """

    async def work() -> int:
        async with connected(nats, state_dir) as bus:
            return await stream_dlq.requeue(bus, sequence)

    stored = run_bounded(work())
    if json:
        show_json({"letter": sequence, "sequence": stored})
    else:
        console.print(f"the message of letter {sequence} is stored again as number {stored}")


def dlq_drop(
    sequence: Sequence, nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Forget a dead letter.

    Example: gyre stream dlq drop 3
    """

    async def work() -> None:
        async with connected(nats, state_dir) as bus:
            await stream_dlq.drop(bus, sequence)

    run_bounded(work())
    if json:
        show_json({"letter": sequence, "dropped": True})
    else:
        console.print(f"letter {sequence} is dropped")
