"""The training worker against a trainer that is scripted: contributions, leaving, restarts of the trainer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from opengyre.host import worker as worker_module
from opengyre.host.gradients import TorchLearner, items_of
from opengyre.host.worker import Worker
from opengyre.learn.codec import unflatten
from opengyre.learn.gradient import accumulate, zero_gradients
from opengyre.proto import subjects
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.ids import group_of
from opengyre.proto.run import Optimization
from opengyre.proto.update import HandOver, HandOverReply, PullReply, PullRequest, WorkItem
from opengyre.proto.weights import Manifest, WeightsRefused
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus, Endpoint, read, serving
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import Settings
from opengyre.tiny.checkpoint import load_pretrained, save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import write_version
from support import eventually

pytestmark = pytest.mark.torch

CONFIG = TinyConfig(vocab_size=64, hidden_size=32, intermediate_size=64)


def member(number: int, score: float, advantage: float) -> Member:
    tokens = tuple((7 * number + 3 * n) % 64 for n in range(20))
    span = Span(start=8, end=20, logprobs=(-4.0,) * 12, versions=(0,) * 12, temperature=1.0)
    return Member(
        execution=f"r-g{number // 10:06d}-e{number % 10:02d}",
        score=score,
        advantage=advantage,
        sequences=(Sequence(tokens=tokens, spans=(span,)),),
        trained_tokens=12,
        path_tokens=20,
    )


def group(number: int, flat: bool = False) -> GroupReady:
    advantages = (0.0, 0.0) if flat else (1.0, -1.0)
    members = tuple(member(10 * number + n, 0.5, a) for n, a in enumerate(advantages))
    names = tuple(one.execution for one in members)
    return GroupReady(run="r", group=f"r-g{number:06d}", task="t", version=0, members=members, executions=names)


def held(taken: HandOver) -> list[str]:
    """The groups of a hand-over."""
    return list(dict.fromkeys(map(group_of, taken.executions)))


class Trainer:
    """Gives what is in `work`, else a flush where something is held, else a wait; `attempt` is its boot."""

    def __init__(self, base: Manifest, work: list[GroupReady]) -> None:
        self.base, self.work, self.attempt = base, work, "t0"
        self.flushing = True
        self.pulls: list[PullRequest] = []
        self.taken: list[HandOver] = []
        self.leased: list[str] = []
        self.replies: list[PullReply] = []

    def item(
        self, group: GroupReady, attempt: str | None = None, executions: tuple[str, ...] | None = None
    ) -> WorkItem:
        return WorkItem(
            update=1,
            attempt=attempt or self.attempt,
            base=self.base,
            group=group,
            executions=group.executions if executions is None else executions,
            weight=1 / 8,
            optimization=Optimization(),
        )

    async def pull(self, request: PullRequest) -> PullReply:
        self.pulls.append(request)
        if self.replies:
            return self.replies.pop(0)
        if request.holding and request.attempt != self.attempt:
            return PullReply(discard=True)
        if self.work:
            self.leased.append(self.work[0].group)
            return PullReply(item=self.item(self.work.pop(0)))
        if request.holding and self.flushing:
            return PullReply(flush=True)
        return PullReply(wait="groups: 0 of 4")

    async def hand_over(self, request: HandOver) -> HandOverReply:
        if request.executions:
            self.taken.append(request)
        return HandOverReply(accepted=True)

    @contextlib.asynccontextmanager
    async def serve(self, bus: Bus) -> AsyncIterator[None]:
        endpoints = {"pull": Endpoint(PullRequest, self.pull), "hand_over": Endpoint(HandOver, self.hand_over)}
        async with serving(bus, "trainer", "any", endpoints):
            yield


class SlowTrainer(Trainer):
    """Takes its time over a gradient."""

    def __init__(self, base: Manifest, work: list[GroupReady]) -> None:
        super().__init__(base, work)
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.offers = 0

    async def hand_over(self, request: HandOver) -> HandOverReply:
        self.offers += bool(request.executions)
        self.asked.set()
        await self.answer.wait()
        return await super().hand_over(request)


@pytest.fixture
def base(tmp_path: Path) -> Manifest:
    model = TinyModel(CONFIG, seed=1)
    save_pretrained(model, tmp_path / "config")
    extra = {"config.json": (tmp_path / "config" / "config.json").read_bytes()}
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return write_version(tensors, tmp_path / "v0", run="r", version=0, parent=None, step=0, extra=extra)


@pytest.fixture
async def context(bus: Bus, tmp_path: Path) -> AsyncIterator[Context]:
    settings = Settings(state_dir=tmp_path)
    async with Blobs(tmp_path / "blobs", settings.cache) as blobs:
        yield Context("host", "test", settings, bus, blobs, "http://127.0.0.1:1")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer here does not know what it gave: an answer that a machine which stalls brings late must not be lost,
    and asked for again."""
    monkeypatch.setattr(worker_module, "ANSWER_S", 60.0)
    monkeypatch.setattr(worker_module, "TAKE_S", 60.0)


@contextlib.asynccontextmanager
async def training(context: Context) -> AsyncIterator[tuple[Worker, asyncio.Event]]:
    worker, leave = Worker(context, "host0", "boot", TorchLearner(1)), asyncio.Event()
    task = asyncio.create_task(worker.train(leave))
    try:
        yield worker, leave
    finally:
        leave.set()
        await asyncio.wait_for(task, 60)
        worker.close()


async def gradient(context: Context, base: Manifest, taken: HandOver) -> dict[str, torch.Tensor]:
    like = dict(load_pretrained(Path(base.directory)).named_parameters())
    return unflatten(await context.blobs.get(taken.gradient), like)


async def test_contributions_add_up_to_the_gradient_of_the_whole(bus: Bus, context: Context, base: Manifest) -> None:
    groups = [group(n) for n in range(3)]
    trainer = Trainer(base, groups[:2])
    async with trainer.serve(bus), training(context):
        await eventually(lambda: len(trainer.taken) == 1)
        trainer.work.append(groups[2])
        await eventually(lambda: len(trainer.taken) == 2)
    first, second = trainer.taken
    assert held(first) + held(second) == [g.group for g in groups]
    assert first.contribution != second.contribution
    assert (first.stats.executions, first.stats.tokens, first.stats.score_sum) == (4, 48, 2.0)
    model = load_pretrained(Path(base.directory))
    whole = zero_gradients(model)
    accumulate(model, [item for g in groups for item in items_of(g.members, trainer.item(g))], whole)
    one, two = [await gradient(context, base, taken) for taken in (first, second)]
    for name, wanted in whole.items():
        assert wanted.abs().max() > 0
        torch.testing.assert_close(one[name] + two[name], wanted, rtol=1e-4, atol=1e-7)


async def test_a_cell_gives_signs_of_life_while_it_hands_a_large_gradient_over(
    bus: Bus, context: Context, base: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of a half gigabyte took longer than a cell may be silent, so what it had computed was thrown away; and
    it was offered again while the trainer was still reading it."""
    monkeypatch.setattr(worker_module, "TAKE_S", 0.05)
    monkeypatch.setattr(worker_module, "TAKEN_PER_S", 1 << 10)
    trainer = SlowTrainer(base, [group(0)])
    async with trainer.serve(bus), training(context) as (worker, _):
        await asyncio.wait_for(trainer.asked.wait(), 60)
        assert worker.group == group(0).group
        await asyncio.sleep(0.5)  # ten times as long as a small one may take
        trainer.answer.set()
        await eventually(lambda: worker.group is None and trainer.offers == 1)
    assert held(trainer.taken[0]) == [group(0).group]
    assert trainer.offers == 1


async def test_a_cell_that_leaves_finishes_its_group_and_hands_over(bus: Bus, context: Context, base: Manifest) -> None:
    trainer = Trainer(base, [group(0)])
    trainer.flushing = False
    async with trainer.serve(bus):
        async with training(context) as (worker, leave):
            await eventually(lambda: any(pull.holding for pull in trainer.pulls))
            leave.set()
        # `training` closed the worker, so what it held is gone: a second one leaves in the proper order.
        assert trainer.taken == []
        trainer.work.append(group(1))
        worker, leave = Worker(context, "host0", "boot", TorchLearner(1)), asyncio.Event()
        task = asyncio.create_task(worker.train(leave))
        await eventually(lambda: trainer.leased == ["r-g000000", "r-g000001"])
        leave.set()
        await asyncio.wait_for(task, 60)
        await worker.leave()
    assert [(held(t), t.leaving) for t in trainer.taken] == [(["r-g000001"], True)]


async def test_what_belongs_to_a_former_attempt_is_dropped(bus: Bus, context: Context, base: Manifest) -> None:
    trainer = Trainer(base, [group(0)])
    trainer.flushing = False
    async with trainer.serve(bus), training(context):
        await eventually(lambda: any(pull.holding for pull in trainer.pulls))
        trainer.attempt, trainer.flushing = "t1", True
        trainer.work.append(group(0))
        await eventually(lambda: bool(trainer.taken))
    assert [(t.attempt, held(t), t.stats.executions) for t in trainer.taken] == [("t1", ["r-g000000"], 2)]


async def test_a_group_that_is_given_twice_is_added_once(bus: Bus, context: Context, base: Manifest) -> None:
    trainer = Trainer(base, [])
    trainer.replies = [PullReply(item=trainer.item(group(0))), PullReply(item=trainer.item(group(0)))]
    async with trainer.serve(bus), training(context):
        await eventually(lambda: bool(trainer.taken))
    assert [(held(t), t.stats.executions) for t in trainer.taken] == [(["r-g000000"], 2)]


async def test_a_group_without_variance_costs_nothing_and_counts(bus: Bus, context: Context, base: Manifest) -> None:
    trainer = Trainer(base, [group(0, flat=True)])
    async with trainer.serve(bus), training(context):
        await eventually(lambda: bool(trainer.taken))
    stats = trainer.taken[0].stats
    assert (stats.executions, stats.tokens, stats.zero_variance_groups, stats.path_tokens) == (2, 0, 1, 40)
    assert all(not g.any() for g in (await gradient(context, base, trainer.taken[0])).values())


async def test_members_that_travel_as_a_blob(bus: Bus, context: Context, base: Manifest) -> None:
    whole = group(0)
    ref = await context.blobs.put(msgspec.json.encode(whole.members))
    trainer = Trainer(base, [msgspec.structs.replace(whole, members=(), blob=ref)])
    async with trainer.serve(bus), training(context):
        await eventually(lambda: bool(trainer.taken))
    assert trainer.taken[0].stats.tokens == 24


@pytest.mark.parametrize("as_blob", [False, True])
async def test_some_executions_of_a_group_at_a_time(bus: Bus, context: Context, base: Manifest, as_blob: bool) -> None:
    whole = group(0)
    first, second = whole.executions
    if as_blob:
        ref = await context.blobs.put(msgspec.json.encode(whole.members))
        whole = msgspec.structs.replace(whole, members=(), blob=ref)
    trainer = Trainer(base, [])
    items = [trainer.item(whole, executions=(name,)) for name in (first, second, second)]
    trainer.replies = [PullReply(item=item) for item in items]
    async with trainer.serve(bus), training(context):
        await eventually(lambda: bool(trainer.taken))
    (taken,) = trainer.taken
    assert taken.executions == (first, second), "the one that was given twice is in it once"
    assert (taken.stats.executions, taken.stats.tokens) == (2, 24)
    assert taken.stats.busy_s > 0


async def test_a_group_that_cannot_be_trained_is_left_out_and_named(bus: Bus, context: Context, base: Manifest) -> None:
    bad = group(0)
    bad = msgspec.structs.replace(
        bad,
        members=(
            msgspec.structs.replace(
                bad.members[0],
                sequences=(msgspec.structs.replace(bad.members[0].sequences[0], tokens=(64,) * 20),),
            ),
        ),
    )
    trainer = Trainer(base, [group(1), bad])
    trainer.flushing = False
    async with trainer.serve(bus), training(context):
        await eventually(lambda: any("vocabulary" in wait.what for wait in context.waits.report()))
        trainer.flushing = True
        await eventually(lambda: bool(trainer.taken))
    assert [held(t) for t in trainer.taken] == [["r-g000001"]]


async def test_a_group_that_is_not_finite_is_named_and_leaves_nothing(
    bus: Bus, context: Context, base: Manifest
) -> None:
    """An advantage that overflows float32: the sum holds what came after it, the update will be skipped."""
    bad = group(1)
    members = (msgspec.structs.replace(bad.members[0], advantage=1e39), *bad.members[1:])
    trainer = Trainer(base, [group(0), msgspec.structs.replace(bad, members=members), group(2)])
    async with trainer.serve(bus), training(context):
        await eventually(lambda: bool(trainer.taken))
    (taken,) = trainer.taken
    assert held(taken) == [f"r-g{number:06d}" for number in range(3)]
    assert taken.stats.broken == ("r-g000001",)
    model = load_pretrained(Path(base.directory))
    last = zero_gradients(model)
    accumulate(model, items_of(group(2).members, trainer.item(group(2))), last)
    for name, tensor in (await gradient(context, base, taken)).items():
        torch.testing.assert_close(tensor, last[name], rtol=1e-4, atol=1e-7)


async def test_a_damaged_base_is_refused_told_and_read_again(bus: Bus, context: Context, base: Manifest) -> None:
    path = Path(base.directory) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    trainer = Trainer(base, [])
    trainer.replies = [PullReply(item=trainer.item(group(0)))]
    async with trainer.serve(bus), training(context):

        async def told() -> list[WeightsRefused]:
            found = [stored.event() for stored in await read(bus, subjects.WEIGHTS, subjects.weights("r", "refused"))]
            return [event for event in found if isinstance(event, WeightsRefused)]

        await eventually(told)
        (refused,) = await told()
        assert (refused.version, refused.host) == (0, "host0")
        assert "model.safetensors has the SHA-256" in refused.error
        path.write_bytes(whole)
        trainer.work.append(group(0))
        await eventually(lambda: bool(trainer.taken))
    assert [held(t) for t in trainer.taken] == [["r-g000000"]]


async def test_a_worker_without_a_trainer_leaves_at_once(bus: Bus, context: Context) -> None:
    worker, leave = Worker(context, "host0", "boot", TorchLearner(1)), asyncio.Event()
    task = asyncio.create_task(worker.train(leave))
    await eventually(lambda: any("trainer" in wait.what for wait in context.waits.report()))
    leave.set()
    async with asyncio.timeout(6):  # less than it has patience for a trainer
        await task
        await worker.leave()


async def test_training_goes_on_after_the_broker_was_away(
    bus: Bus, nats_server, context: Context, base: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "ANSWER_S", 2.0)  # what was asked of the former broker is answered by none
    trainer = Trainer(base, [group(0)])
    trainer.flushing = False
    async with trainer.serve(bus), training(context):
        await eventually(lambda: any(pull.holding for pull in trainer.pulls))
        await asyncio.to_thread(nats_server.kill)
        await asyncio.to_thread(nats_server.start)
        trainer.work.append(group(1))
        await eventually(lambda: len(trainer.leased) == 2)
        trainer.flushing = True
        await eventually(lambda: bool(trainer.taken))
    assert [held(t) for t in trainer.taken] == [["r-g000000", "r-g000001"]]
