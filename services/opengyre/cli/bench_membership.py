"""`gyre bench membership`: what it costs that members of an update come, leave and die, three ways side by side.

Two members; a third joins and leaves in order, several times; others join and are killed in the midst of a step. A
stall is how much longer than a usual step the others wait for their next sum; medians throughout. Members are processes
that have imported all that they need, and what they sum is there already.

Waits: for answers of members, `BOUND_S` at most each.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import multiprocessing as mp
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console

from opengyre.cli.bench_membership_ways import NAME, WAYS, quiet
from opengyre.cli.bench_options import ENDING, chosen, numbers
from opengyre.cli.client import JsonOption, console, number, show_json
from opengyre.cli.sim_views import narrow
from opengyre.cli.stack import StackError

BOUND_S: Final = 60.0
HEARTBEAT_MS: Final = 1500
REPEATS: Final = 5
KILLS: Final = 3
errors = Console(stderr=True, highlight=False)


class MembershipRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. `missing`: why this way was not measured."""

    way: str
    parameters: int
    step_ms: float | None = None
    """With two members."""
    join_ms: float | None = None
    """From the decision to the first sum that has the newcomer's part."""
    join_stall_ms: float | None = None
    leave_stall_ms: float | None = None
    kill_stall_ms: float | None = None
    missing: str | None = None


def register(bench: typer.Typer) -> None:
    bench.command("membership")(membership)


def membership(
    ways: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(WAYS)}.")] = ",".join(WAYS),
    parameters: Annotated[str, typer.Option(help="Sizes of the model, comma-separated.")] = "500000,8000000",
    steps: Annotated[int, typer.Option(min=3, max=10_000, help="Steps that the usual one is the median of.")] = 30,
    json: JsonOption = False,
) -> None:
    """Measure joining, leaving and dying members of an update. torchft is measured where it is installed.

    Example: gyre bench membership --ways blobs,regroup
    """
    wanted, sizes = chosen("--ways", ways, WAYS), numbers("--parameters", parameters, 1, 1_000_000_000)
    if importlib.util.find_spec("torch") is None:
        raise StackError("the members need torch; install it with: pip install 'opengyre[trainer]'")
    rows = [measure(way, size, steps) for size in sizes for way in wanted]
    if json:
        show_json(rows)
        return
    shown = narrow("way", "", "parameters", "step", "join", "stall: join", "leave", "kill")
    for row in rows:
        found = (row.step_ms, row.join_ms, row.join_stall_ms, row.leave_stall_ms, row.kill_stall_ms)
        shown.add_row(row.way, row.missing or "", str(row.parameters), *(number(value, 1) for value in found))
    shown.caption = "milliseconds"
    console.print(shown)


def measure(way: str, parameters: int, steps: int) -> MembershipRow:
    """One row. Raises `StackError` where a member does not answer."""
    if way == "torchft" and importlib.util.find_spec("torchft") is None:
        return MembershipRow(way=way, parameters=parameters, missing="torchft is not installed")
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as directory:
        found = _torchft(parameters) if way == "torchft" else _driven(way, parameters, steps, Path(directory))
    values = {key: round(1e3 * max(0.0, seconds), 2) for key, seconds in found.items()}
    return msgspec.convert({"way": way, "parameters": parameters, **values}, MembershipRow)


@dataclass(slots=True)
class _Member:
    process: BaseProcess
    pipe: Connection

    def say(self, message: Any) -> None:
        self.pipe.send(message)

    def hear(self) -> Any:
        """The answer; None from a member that has died."""
        try:
            if self.pipe.poll(BOUND_S):
                return self.pipe.recv()
        except (EOFError, OSError):
            return None
        raise StackError(f"a member did not answer within {BOUND_S:g} s")

    def kill(self) -> None:
        self.process.kill()


@contextlib.contextmanager
def _unsignalled() -> Iterator[None]:
    """A process that is started in this block is whole before a signal ends the bench, and has none itself but SIGKILL:
    a terminal's Ctrl-C is the bench's to pass on."""
    resource_tracker.ensure_running()  # else it starts with the process, and lets signals in again
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def _members(way: str, arguments: Sequence[tuple[int, str]]) -> Iterator[list[_Member]]:
    context = mp.get_context("spawn")
    found: list[_Member] = []
    try:
        for given in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=WAYS[way], args=(theirs, *given), daemon=True)
            with _unsignalled():
                process.start()
                found.append(_Member(process, ours))
            theirs.close()
        for member in found:
            if member.hear() != "ready":
                raise StackError(f"a member of the way {way} ended before it was ready")
        yield found
    finally:
        for member in found:
            member.kill()
            member.process.join(5)
            member.pipe.close()


@dataclass(slots=True)
class _Driver:
    """Tells members to step, and forms their set anew."""

    way: str
    directory: Path
    add: Callable[[Sequence[str]], None]
    epoch: int = 0
    number: int = 0
    members: list[_Member] = field(default_factory=list)

    def step(self, killed: _Member | None = None) -> float:
        """Seconds until the members have their sum; one of them is `killed` meanwhile."""
        began = time.monotonic()
        for member in self.members:
            self.number += 1
            member.say(("step", self.number))
        if killed is not None:
            killed.kill()
            began = time.monotonic()
        answers = [member.hear() for member in self.members]
        if killed is not None:
            self.members = [member for member in self.members if member is not killed]
        if self.way == "blobs":
            self.add([ref for ref in answers if ref is not None])
        elif not all(answer == "summed" for answer in answers):
            self.form(self.members)
            self.step()
        return time.monotonic() - began

    def form(self, members: list[_Member], newcomer: bool = False) -> None:
        """These are the members from now on."""
        if self.way == "blobs":
            if newcomer:
                members[-1].say(("join", str(self.directory / "weights.safetensors")))
                members[-1].hear()
        else:
            self.epoch += 1
            for rank, member in enumerate(members):
                member.say(("group", self.epoch, rank, len(members), newcomer))
            if any(member.hear() != "grouped" for member in members):
                raise StackError("the members could not form a group")
        self.members = members

    def change(self, members: list[_Member], newcomer: bool = False) -> tuple[float, float]:
        """Seconds from the decision to the first sum of the new set, and how long the others wait for that."""
        began = time.monotonic()
        self.form(members, newcomer)
        formed = time.monotonic() - began
        step = self.step()
        # Where nobody waits for another, forming holds up nobody.
        return formed + step, step if self.way == "blobs" else formed + step


def _driven(way: str, parameters: int, steps: int, directory: Path) -> dict[str, float]:
    add = _adder(directory, parameters) if way == "blobs" else lambda _refs: None
    with _members(way, [(parameters, str(directory))] * (3 + KILLS)) as found:
        pair, third = found[:2], found[2]
        driver = _Driver(way, directory, add)
        usual: dict[int, float] = {}
        for members in ([*pair, third], pair):
            driver.form(members)
            driver.step()
            usual[len(members)] = statistics.median(driver.step() for _ in range(steps))
        joins, leaves, kills = [], [], []
        for _ in range(REPEATS):
            joins.append(driver.change([*pair, third], newcomer=True))
            leaves.append(driver.change(pair))
        for victim in found[3:]:
            driver.form([*pair, victim], newcomer=True)
            driver.step()
            kills.append(driver.step(victim))
    return {
        "step_ms": usual[2],
        "join_ms": statistics.median(total for total, _ in joins),
        "join_stall_ms": statistics.median(held for _, held in joins) - usual[3],
        "leave_stall_ms": statistics.median(held for _, held in leaves) - usual[2],
        "kill_stall_ms": statistics.median(kills) - usual[2],
    }


def _adder(directory: Path, parameters: int) -> Callable[[Sequence[str]], None]:
    """Reads gradients and adds them up, as the trainer does; also writes the weights that a newcomer reads."""
    import torch
    from safetensors.torch import save_file

    from opengyre.learn.codec import unflatten
    from opengyre.shared.blobs import Blobs
    from opengyre.shared.settings import CacheSettings

    like = {NAME: torch.zeros(parameters)}
    save_file(like, directory / "weights.safetensors")
    store = Blobs(directory, CacheSettings())

    async def read(refs: Sequence[str]) -> None:
        total = torch.zeros(parameters)
        for ref in refs:
            total += unflatten(await store.get(ref), like)[NAME]
            await store.discard(ref)

    return lambda refs: asyncio.run(read(refs))


def _torchft(parameters: int) -> dict[str, float]:
    """Members go on by themselves; each tells how many they are whenever that changes, and its steps at the end."""
    names = [f"member{number}" for number in range(3 + KILLS)]
    with _lighthouse() as address, _members("torchft", [(parameters, name) for name in names]) as found:
        first, second, third = found[:3]
        joins: list[tuple[float, float]] = []
        leaves: list[float] = []
        kills: list[float] = []
        first.say(address)
        second.say(address)
        _until(first, 2)
        for _ in range(REPEATS):
            joins.append((time.monotonic(), 0.0))
            third.say(address)
            joins[-1] = (joins[-1][0], _until(first, 3))
            leaves.append(time.monotonic())
            third.say("stop")
            _until(first, 2)
            third.hear()
        for victim in found[3:]:
            victim.say(address)
            _until(first, 3)
            kills.append(time.monotonic())
            victim.kill()
            _until(first, 2)
        first.say("stop")
        steps = first.hear()
    if not isinstance(steps, list):
        raise StackError("a member of the way torchft ended before its steps were told")
    gaps = [(end, end - begin, members) for (begin, _), (end, members) in itertools.pairwise(steps)]
    usual = {many: statistics.median(gap for _, gap, members in gaps if members == many) for many in (2, 3)}

    def longest(after: float, before: float) -> float:
        return max(gap for end, gap, _ in gaps if end > after and end - gap < before)

    def until_two(when: float) -> float:
        return next(end for end, _, members in gaps if end > when and members == 2)

    return {
        "step_ms": usual[2],
        "join_ms": statistics.median(together - asked for asked, together in joins),
        "join_stall_ms": statistics.median(longest(*pair) for pair in joins) - usual[3],
        "leave_stall_ms": statistics.median(longest(when, until_two(when)) for when in leaves) - usual[2],
        "kill_stall_ms": statistics.median(longest(when, until_two(when)) for when in kills) - usual[2],
    }


def _until(member: _Member, many: int) -> float:
    """When it first made a step with so many members."""
    while True:
        heard = member.hear()
        if heard is None:
            raise StackError("a member of the way torchft ended")
        if heard[0] == many:
            return heard[1]


@contextlib.contextmanager
def _lighthouse() -> Iterator[str]:
    """Runs one in a process of its own; its address."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    try:
        with _unsignalled():
            server.start()
        if not ours.poll(BOUND_S):
            raise StackError(f"the lighthouse did not answer within {BOUND_S:g} s")
        yield ours.recv()
    finally:
        if server.pid is not None:
            server.kill()
            server.join(5)


def _serve(pipe: Connection) -> None:
    quiet()
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports] - not a dependency

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=HEARTBEAT_MS
    )
    pipe.send(server.address().replace(os.uname().nodename, "localhost"))
    with contextlib.suppress(EOFError):
        pipe.recv()
