"""A training cell of two ranks: the gradient of one process, and what is lost with a rank."""

import asyncio
import errno
import os
import signal
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load

from opengyre.host.compute import Work
from opengyre.host.crew import CrewLearner, backend_of, parts_of
from opengyre.host.gradients import TorchLearner
from opengyre.host.learners import Accumulator, Learner, LearnerLostError, UntrainableError
from opengyre.learn.gradient import Item
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Optimization
from opengyre.proto.update import WorkItem
from opengyre.proto.weights import Manifest
from opengyre.ranks import crew as crew_module
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.manifest import describe, read
from support.gradients import written
from support.models import LLAMA, save_stock
from support.treegrad import error

pytestmark = pytest.mark.torch


def member(number: int, advantage: float, first: int = 1) -> Member:
    tokens = (first, 2, 3, *range(4, 6 + number))
    count = len(tokens) - 3
    span = Span(start=3, end=len(tokens), logprobs=(-1.5,) * count, versions=(0,) * count, temperature=1.0)
    return Member(
        execution=f"r-g000000-e{number:02}", score=0.5, advantage=advantage, trained_tokens=count,
        path_tokens=len(tokens), sequences=(Sequence(tokens=tokens, spans=(span,)),),
    )  # fmt: skip


GROUPS = (
    [member(number, advantage) for number, advantage in enumerate((1.0, -0.5, 0.25))],
    [member(3, 2.0)],  # One of the ranks has nothing.
    [member(4, 0.0)],
)


def work(base: Manifest, members: list[Member], **optimization) -> WorkItem:
    group = GroupReady(run="r", group="r-g000000", task="t", version=0, members=tuple(members))
    return WorkItem(
        update=1, attempt="a", base=base, group=group, weight=0.125, optimization=Optimization(**optimization)
    )


async def summed(learner: Learner, base: Manifest, name: str = "c") -> Accumulator:
    held: Accumulator | None = None
    for members in GROUPS:
        held = await learner.add(work(base, members, loss="sequence"), members, held, name)
    assert held is not None
    return held


async def test_two_ranks_compute_what_one_process_does_and_lose_a_sum_with_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the other loses it tells at once, and the kernel may tell of the end of a process later.
    monkeypatch.setattr(crew_module, "GRACE_S", 60.0)
    base = read(save_stock(tmp_path / "stock", LLAMA))
    alone, ranks = TorchLearner(1), CrewLearner(2, 1, chunk=3, offload=False)
    alone.open()
    ranks.open()
    try:
        wanted, found = await summed(alone, base), await summed(ranks, base)
        gradient = load(await written(alone, wanted))
        assert error(load(await written(ranks, found)), gradient) < 1e-6
        for name in ("executions", "tokens", "path_tokens", "token_staleness_sum", "score_sum"):
            assert getattr(found.stats, name) == getattr(wanted.stats, name)
        assert found.stats.kl_sum == pytest.approx(wanted.stats.kl_sum, rel=1e-4)

        strange = [member(0, 1.0), member(5, 1.0, first=LLAMA["vocab_size"])]
        with pytest.raises(UntrainableError, match="outside the vocabulary of 40"):
            await ranks.add(work(base, strange), strange, found, "c")
        assert error(load(await written(ranks, found)), gradient) < 1e-6, "nothing was added"

        endless = [member(0, float("inf")), member(1, 1.0)]
        found = await ranks.add(work(base, endless), endless, found, "c")
        assert found.stats.broken == ("r-g000000",)
        assert not any(tensor.any() for tensor in load(await written(ranks, found)).values())

        assert ranks.pids
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(LearnerLostError, match="rank 1 of 2 ended by signal 9"):
            await ranks.add(work(base, GROUPS[0]), GROUPS[0], found, "c")
        with pytest.raises(LearnerLostError, match="have ended"):
            await written(ranks, found)
        with pytest.raises(LearnerLostError, match="have ended"):
            await ranks.add(work(base, GROUPS[0]), GROUPS[0], found, "c")
        again = await summed(ranks, base, "d")
        assert error(load(await written(ranks, again)), gradient) < 1e-6

        tiny = TinyModel(TinyConfig(64, hidden_size=16, intermediate_size=24, num_attention_heads=2))
        save_pretrained(tiny, tmp_path / "tiny")
        files = tuple(describe(path) for path in sorted((tmp_path / "tiny").iterdir()))
        other = msgspec.structs.replace(base, version=1, directory=str(tmp_path / "tiny"), files=files)
        wanted, found = await summed(alone, other), await summed(ranks, other, "e")
        assert error(load(await written(ranks, found)), load(await written(alone, wanted))) < 1e-6
    finally:
        alone.close()
        ranks.close()
        await ranks.ended()


async def test_ranks_that_cannot_be_started_are_no_ranks_that_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a process or a file to spare: the host waited for ever, and could not leave its role."""

    async def none_left(_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(crew_module, "_launch", none_left)
    base = read(save_stock(tmp_path / "stock", LLAMA))
    ranks = CrewLearner(2, 1, chunk=3, offload=False)
    ranks.open()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(LearnerLostError, match=r"no ranks can be started: .*temporarily unavailable"):
                await ranks.add(work(base, GROUPS[0]), GROUPS[0], None, "c")
    finally:
        ranks.close()
        await ranks.ended()


def test_what_is_of_one_execution_stays_with_one_rank() -> None:
    sequence = GROUPS[0][0].sequences[0]
    items = [Item(sequence, 1.0, 1.0) for _ in range(5)]
    parts = parts_of(Work(items, [0, 0, 1, 2, 1], Optimization(), 3), 3)
    assert [part.executions for part in parts] == [[0, 0], [1, 1], [2]]
    assert [part.executions for part in parts_of(Work(items[:1], [0], Optimization(), 3), 2)] == [[0], []]


def test_ranks_with_a_gpu_each_use_nccl() -> None:
    assert [backend_of(2, gpus) for gpus in (0, 1, 2)] == ["gloo", "gloo", "nccl"]
