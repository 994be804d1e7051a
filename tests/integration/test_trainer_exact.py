"""One update is the same whoever computes it: any number of cells, that join, leave and are killed under way."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from opengyre.proto import subjects
from opengyre.proto.group import GroupReady
from opengyre.proto.run import Dispatch, Elastic, Optimization, RunSpec
from opengyre.proto.update import Committed, Contributed
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import load_pretrained, save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import version_directory
from support import eventually
from support.trainer_cells import TrainingCell, cells, real_group, through
from support.trainer_fakes import CONFIG, events, offer, trainer

pytestmark = pytest.mark.torch

TESTS = Path(__file__).resolve().parents[1]
B, G, UPDATES = 3, 4, 2
Play = Callable[[Bus, Blobs, Path], Awaitable[None]]
"""What cells do from the start of a run to its end."""


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@dataclass
class Outcome:
    committed: list[Committed]
    contributed: list[Contributed]
    tensors: dict[str, torch.Tensor]

    @property
    def hosts(self) -> set[str]:
        """Who handed something over for the first update."""
        return {event.host for event in self.contributed if event.update == 1}


async def committed(bus: Bus, run: str) -> list[Committed]:
    return await events(bus, subjects.UPDATES, subjects.update(run, "committed"))


async def until_committed(bus: Bus, run: str, version: int) -> None:
    async def there() -> bool:
        return len(await committed(bus, run)) >= version

    await eventually(there, 90)


async def begin(
    bus: Bus, folder: Path, run: str, updates: int = UPDATES, *, offered: bool = True, canary: bool = False
) -> None:
    if not (folder / "model").exists():
        save_pretrained(TinyModel(CONFIG, seed=1), folder / "model")
    spec = RunSpec(
        run=run, model=str(folder / "model"), updates=updates, elastic=Elastic(grain=1),
        dispatch=Dispatch(phi=0, mu=updates, batch_groups=B, group_size=G),
        optimization=Optimization(learning_rate=0.01, schedule="linear", canary=canary),
    )  # fmt: skip
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(run, spec)
    if offered:
        await offer(bus, *(real_group(run, number, G) for number in range(updates * B)))


async def outcome(bus: Bus, folder: Path, run: str, version: int = UPDATES, *, skipped: bool = False) -> Outcome:
    """Checks, too, that each execution is in one commit."""
    done = await committed(bus, run)
    names = [name for event in done for name in event.executions]
    assert sorted(names) == sorted(m.execution for n in range(version * B) for m in real_group(run, n, G).members)
    assert skipped or all(event.skipped is None for event in done)
    weights = load_pretrained(version_directory(folder / "state" / "weights" / run, version))
    contributed = await events(bus, subjects.UPDATES, subjects.update(run, "contributed"))
    return Outcome(done, contributed, {name: p.detach() for name, p in weights.named_parameters()})


async def play(bus: Bus, blobs: Blobs, folder: Path, run: str, act: Play, **settings: object) -> Outcome:
    await begin(bus, folder, run)
    async with trainer(bus, blobs, folder, f"t-{run}", **settings):
        await act(bus, blobs, folder)
        await until_committed(bus, run, UPDATES)
    return await outcome(bus, folder, run)


def check_same(one: Outcome, other: Outcome) -> None:
    """Parameters to 1e-6 of their norm, and both far from where they began."""
    start = dict(TinyModel(CONFIG, seed=1).named_parameters())
    for name, wanted in one.tensors.items():
        moved = float((wanted - start[name].detach()).norm())
        assert moved > 1e-2 * float(wanted.norm())
        assert float((other.tensors[name] - wanted).norm()) <= 1e-6 * float(wanted.norm()), name
    assert [e.stats.loss for e in other.committed] == pytest.approx([e.stats.loss for e in one.committed], rel=1e-5)
    norms = [[event.gradient_norm for event in each.committed] for each in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


async def together(bus: Bus, blobs: Blobs, folder: Path, number: int, run: str) -> None:
    """So many cells, each of which holds something before any computes."""
    barrier = asyncio.Barrier(number)

    async def gate(taken: int) -> None:
        if taken == 1:
            await barrier.wait()

    async with cells(bus, blobs, folder, *[gate] * number):
        await until_committed(bus, run, UPDATES)


async def joined_and_left(bus: Bus, blobs: Blobs, folder: Path, run: str) -> None:
    """The first holds 5 executions when the second joins; that takes 3, and leaves."""
    second_has_left = asyncio.Event()
    five = asyncio.Event()

    async def first(taken: int) -> None:
        if taken == 6:
            five.set()
            await second_has_left.wait()

    async with cells(bus, blobs, folder, first):
        await asyncio.wait_for(five.wait(), 90)
        three = asyncio.Event()

        async def second(taken: int) -> None:
            if taken == 3:
                three.set()

        newcomer = TrainingCell(bus, blobs, folder, "h1", second)
        await asyncio.wait_for(three.wait(), 90)
        await newcomer.leave()
        second_has_left.set()
        await until_committed(bus, run, UPDATES)


async def killed(bus: Bus, blobs: Blobs, folder: Path, run: str, url: str, python: str) -> None:
    """kill -9 of a process that holds 3 executions and was given a fourth; then another cell does it all."""
    command = [python, "-m", "support.trainer_cells", url, str(folder / "state"), "lost", "4"]
    process = await asyncio.create_subprocess_exec(*command, cwd=TESTS, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"held\n"
    finally:
        process.kill()
        await process.communicate()
    async with cells(bus, blobs, folder, through):
        await until_committed(bus, run, UPDATES)


async def test_one_update_is_the_same_on_any_cells(
    bus: Bus, blobs: Blobs, nats_server, tmp_path: Path, python: str
) -> None:
    """Undisturbed on 1, 2 and 3 cells; with a join and a leave half-way; with a kill -9 half-way."""
    acts: dict[str, Play] = {
        "one": lambda b, s, f: together(b, s, f, 1, "one"),
        "two": lambda b, s, f: together(b, s, f, 2, "two"),
        "three": lambda b, s, f: together(b, s, f, 3, "three"),
        "joined": lambda b, s, f: joined_and_left(b, s, f, "joined"),
        "killed": lambda b, s, f: killed(b, s, f, "killed", nats_server.url, python),
    }
    found = {
        run: await play(bus, blobs, tmp_path, run, act, cell_timeout_s=5 if run == "killed" else 100)
        for run, act in acts.items()
    }
    assert [len(found[run].hosts) for run in ("one", "two", "three", "joined")] == [1, 2, 3, 2]
    gone = await events(bus, subjects.UPDATES, subjects.update("killed", "left"))
    assert [(event.host, event.reason) for event in gone] == [("lost", "silent for 5 s")]
    for run in ("two", "three", "joined", "killed"):
        check_same(found["one"], found[run])


async def test_what_three_cells_began_one_goes_on_with(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    """The trainer is another process by then: all it has is the checkpoint."""
    updates = 4
    for run in ("whole", "resumed"):
        await begin(bus, tmp_path, run, updates)
        if run == "resumed":
            async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, *[through] * 3):
                await until_committed(bus, run, 2)
        async with trainer(bus, blobs, tmp_path, "t1"), cells(bus, blobs, tmp_path, through):
            await until_committed(bus, run, updates)
    whole, resumed = [await outcome(bus, tmp_path, run, updates) for run in ("whole", "resumed")]
    check_same(whole, resumed)
    assert [event.learning_rate for event in resumed.committed] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


async def test_a_group_that_is_not_finite_is_named_alone_and_changes_nothing(
    bus: Bus, blobs: Blobs, tmp_path: Path
) -> None:
    """Its gradient overflows float32; the others of its contribution are as good as ever, and not named."""
    run, updates = "spoilt", 2
    await begin(bus, tmp_path, run, updates, offered=False)
    groups = [real_group(run, number, G) for number in range(updates * B)]
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through) as [cell]:
        cell.learner.wild = groups[1].group
        await offer(bus, *groups)
        await until_committed(bus, run, updates)
    found = await outcome(bus, tmp_path, run, updates, skipped=True)
    assert [event.skipped for event in found.committed] == ["non_finite_loss; in spoilt-g000001", None]
    weights = tmp_path / "state" / "weights" / run
    first, second = [load_pretrained(version_directory(weights, version)).state_dict() for version in (0, 1)]
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


async def test_the_figures_of_a_canary_stay_as_they_are(bus: Bus, blobs: Blobs, tmp_path: Path) -> None:
    """The same groups twice: with a learning rate of 0 the second update sees what the first one saw."""
    run = "canary"
    await begin(bus, tmp_path, run, 2, offered=False, canary=True)
    groups = [real_group(run, number, G) for number in range(B)]
    again = [renamed(group, f"{run}-g{number:06d}") for number, group in enumerate(groups, B)]
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through):
        await offer(bus, *groups, *again)
        await until_committed(bus, run, 2)
    one, two = await committed(bus, run)
    assert one.learning_rate == two.learning_rate == 0
    assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-6) != 0
    assert one.stats.kl_sum == pytest.approx(two.stats.kl_sum, rel=1e-6) != 0
    # Only tokens that the version at hand sampled are compared with the engine's.
    assert (one.stats.logprob_gap_tokens, two.stats.logprob_gap_tokens) == (one.stats.tokens, 0)
    weights = tmp_path / "state" / "weights" / run
    first, last = [load_pretrained(version_directory(weights, version)).state_dict() for version in (0, 2)]
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())


def renamed(group: GroupReady, name: str) -> GroupReady:
    members = tuple(
        msgspec.structs.replace(member, execution=f"{name}{member.execution[-4:]}") for member in group.members
    )
    executions = tuple(member.execution for member in members)
    return msgspec.structs.replace(group, group=name, members=members, executions=executions)
