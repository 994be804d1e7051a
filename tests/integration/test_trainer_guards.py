"""Losses, averages and guards of a run, with cells that compute its gradients for real."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from opengyre.learn.gradient import Item, accumulate, zero_gradients
from opengyre.learn.objective import objective
from opengyre.proto import subjects
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.run import Dispatch, Optimization, RunSpec
from opengyre.proto.update import Committed
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.checkpoint import load_pretrained, save_pretrained
from opengyre.tiny.model import TinyModel
from opengyre.trees.weights import Rollout, weights
from support import eventually
from support.trainer_cells import cells, real_group, through
from support.trainer_fakes import CONFIG, RUN, B, events, offer, trainer

pytestmark = pytest.mark.torch

G = 3


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    policy = TinyModel(CONFIG, seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    save_pretrained(policy, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


async def start(bus: Bus, model: Path, updates: int, optimization: Optimization) -> None:
    dispatch = Dispatch(phi=1, mu=1, batch_groups=B, group_size=G)
    spec = RunSpec(run=RUN, model=str(model), updates=updates, dispatch=dispatch, optimization=optimization)
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, spec)


async def trained(bus: Bus, updates: int) -> list[Committed]:
    """The commits, once there are as many."""

    async def all_there() -> bool:
        return len(await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))) >= updates

    await eventually(all_there, timeout_s=90)
    return await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))


def sampled_by(policy: TinyModel, group: GroupReady) -> GroupReady:
    """The group with the log-probs that an engine with these weights tells."""

    def told(member: Member) -> Member:
        [sequence] = member.sequences
        [span] = sequence.spans
        with torch.no_grad():
            logp = torch.log_softmax(policy(torch.tensor([sequence.tokens]))[0], -1)
        found = tuple(float(logp[at - 1, sequence.tokens[at]]) for at in range(span.start, span.end))
        span = msgspec.structs.replace(span, logprobs=found)
        return msgspec.structs.replace(member, sequences=(msgspec.structs.replace(sequence, spans=(span,)),))

    return msgspec.structs.replace(group, members=tuple(map(told, group.members)))


def reference_norm(model: Path, groups: list[GroupReady], optimization: Optimization) -> float:
    """Norm of the gradient of the whole update, with the weights of the whole step."""
    policy = load_pretrained(model)
    members = [(group.group, member) for group in groups for member in group.members]
    each = weights(
        [Rollout(name, member.trained_tokens) for name, member in members],
        optimization.average,
        optimization.constant_tokens or 0,
    )
    items = [
        Item(sequence, member.advantage, weight)
        for (_, member), weight in zip(members, each, strict=True)
        for sequence in member.sequences
    ]
    gradients = zero_gradients(policy)
    accumulate(policy, items, gradients, loss=objective(optimization), base_version=0)
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


@pytest.mark.parametrize(
    "optimization",
    [
        Optimization(average="execution", loss="truncated"),
        Optimization(average="token", loss="clip"),
        Optimization(average="prompt", loss="sequence", sequence_low=0.5, sequence_high=2.0),
        Optimization(average="constant", constant_tokens=5, loss="reinforce"),
    ],
    ids=lambda optimization: f"{optimization.average}-{optimization.loss}",
)
async def test_two_cells_make_the_gradient_of_the_whole_update(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path, optimization: Optimization
) -> None:
    """Each group comes whole or, for the second, as a blob; a group without advantages weighs as others do."""
    groups = [real_group(RUN, number, G) for number in range(B)]
    await start(bus, model, 1, optimization)
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through, through):
        blob = await blobs.put(msgspec.json.encode(groups[1].members))
        await offer(bus, groups[0], msgspec.structs.replace(groups[1], members=(), blob=blob))
        [done] = await trained(bus, 1)
    assert done.skipped is None
    assert done.gradient_norm == pytest.approx(reference_norm(model, groups, optimization), rel=1e-4)
    tokens = sum(member.trained_tokens for group in groups for member in group.members)
    assert (done.stats.tokens, done.stats.token_versions) == (tokens, {0: tokens})
    assert 0 < done.stats.unique_tokens <= sum(len(m.sequences[0].tokens) for g in groups for m in g.members)


async def test_a_canary_stays_flat(bus: Bus, blobs: Blobs, model: Path, tmp_path: Path) -> None:
    """Every version is the initial model, so the engine's log-probs are the trainer's in each."""
    policy = load_pretrained(model)
    await start(bus, model, 3, Optimization(canary=True, weight_decay=0.1))
    groups = [sampled_by(policy, real_group(RUN, number, G)) for number in range(3 * B)]
    async with trainer(bus, blobs, tmp_path, "t0") as context, cells(bus, blobs, tmp_path, through):
        await offer(bus, *groups)
        done = await trained(bus, 3)
        assert context.gauges["logprob_gap_alarm"] == 0
    for update in done:
        assert (update.skipped, update.alarm, update.learning_rate) == (None, None, 0.0)
        assert update.gradient_norm > 0
        assert update.stats.effective_share == pytest.approx(1.0, abs=1e-6)
        assert update.stats.kl_sum == pytest.approx(0.0, abs=1e-5)
    first = done[0].stats
    assert first.logprob_gap_tokens == first.tokens
    assert first.logprob_gap_sum / first.logprob_gap_tokens < 1e-5
    published = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
    assert [event.manifest.version for event in published] == [0, 1, 2, 3]
    assert len({tuple(file.sha256 for file in event.manifest.files) for event in published}) == 1


async def test_an_engine_that_disagrees_is_an_alarm_until_it_agrees(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    policy = load_pretrained(model)
    wrong = [real_group(RUN, number, G) for number in range(B)]
    right = [sampled_by(policy, real_group(RUN, B + number, G)) for number in range(B)]
    await start(bus, model, 3, Optimization(canary=True, logprob_gap_alarm=0.1))
    async with trainer(bus, blobs, tmp_path, "t0") as context, cells(bus, blobs, tmp_path, through):
        await offer(bus, *wrong)
        [first] = await trained(bus, 1)
        assert first.alarm is not None
        assert "optimization.logprob_gap_alarm is 0.1; likely the engine" in first.alarm

        def shown() -> bool:
            return any(str(first.alarm) in wait.what for wait in context.waits.report())

        await eventually(shown)
        assert context.gauges["logprob_gap_alarm"] == 1
        # Their tokens are of version 0, so at version 1 none is of the version that is trained: no gap, and no alarm.
        await offer(bus, *right)
        second = (await trained(bus, 2))[-1]
        assert (second.alarm, second.stats.logprob_gap_tokens) == (None, 0)
        await eventually(lambda: not shown())


async def test_a_pull_to_the_initial_model_is_measured_and_trains_groups_without_advantages(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    groups = [real_group(RUN, number, G) for number in range(2 * B)]
    flat = [
        msgspec.structs.replace(
            group, members=tuple(msgspec.structs.replace(member, advantage=0.0) for member in group.members)
        )
        for group in groups[B:]
    ]
    await start(bus, model, 2, Optimization(kl=0.5, learning_rate=0.01))
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through):
        await offer(bus, *groups[:B], *flat)
        first, second = await trained(bus, 2)
    assert first.stats.reference_kl_sum == pytest.approx(0.0, abs=1e-6), "the policy is the initial model"
    assert second.stats.reference_kl_sum > 0
    assert second.stats.zero_variance_groups == B
    assert second.stats.tokens == sum(member.trained_tokens for group in flat for member in group.members)
    assert second.gradient_norm > 0


async def test_a_group_that_is_not_finite_skips_its_update_and_is_named(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    good, bad = real_group(RUN, 0, G), real_group(RUN, 1, G)
    later = [real_group(RUN, 2 + number, G) for number in range(B)]
    await start(bus, model, 2, Optimization())
    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through) as [cell]:
        cell.learner.wild = bad.group
        await offer(bus, good, bad, *later)
        first, second = await trained(bus, 2)
    assert first.skipped == "non_finite_loss; in r-g000001"
    assert (second.skipped, second.gradient_norm > 0) == (None, True)
    published = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
    shas = [tuple(file.sha256 for file in event.manifest.files) for event in published]
    assert shas[0] == shas[1] != shas[2]
    consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    assert {c.group: c.outcome for c in consumed} == {
        "r-g000000": "dropped", "r-g000001": "dropped", "r-g000002": "trained", "r-g000003": "trained",
    }  # fmt: skip


async def test_a_group_with_bad_figures_is_refused_by_name(bus: Bus, blobs: Blobs, model: Path, tmp_path: Path) -> None:
    group = real_group(RUN, 0, G)
    [sequence] = group.members[1].sequences
    span = msgspec.structs.replace(sequence.spans[0], logprobs=sequence.spans[0].logprobs[:-1])
    sequence = msgspec.structs.replace(sequence, spans=(span,))
    member = msgspec.structs.replace(group.members[1], sequences=(sequence,))
    bad = msgspec.structs.replace(group, members=(group.members[0], member, group.members[2]))
    await start(bus, model, 1, Optimization())
    async with trainer(bus, blobs, tmp_path, "t0"):
        await offer(bus, bad)

        async def letters() -> list:
            return await events(bus, subjects.DLQ, subjects.dlq("*", "*"))

        await eventually(letters)
        [letter] = await letters()
    assert letter.error.startswith("r-g000000-e01: the span [6, ")
    assert letter.error.endswith("it needs one for each token")
    consumed = await events(bus, subjects.TASKS, subjects.task(RUN, "*", "consumed"))
    assert [(c.group, c.outcome, c.reason) for c in consumed] == [("r-g000000", "dropped", "invalid_group")]
