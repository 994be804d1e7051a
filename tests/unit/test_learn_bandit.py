"""A task whose best policy is known: tokens in contexts, each with a value; learnt by what a run is trained with.

An execution is a context and some tokens, one a position; it scores the mean value of its tokens. So the best policy
takes the best token everywhere, and what a policy is worth can be calculated. Contexts differ in length, so that
averages differ; a batch is trained twice, so that half of the updates are off-policy.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from opengyre.learn.advantage import advantages
from opengyre.learn.gradient import Item, accumulate, zero_gradients
from opengyre.learn.objective import objective
from opengyre.learn.update import apply_update
from opengyre.proto.group import Sequence, Span
from opengyre.proto.run import Optimization
from opengyre.trees.weights import Part, commit_scale, local_weight

pytestmark = pytest.mark.torch

VOCAB = 6
LENGTHS = (1, 2, 4)
"""Of each context: a token of the vocabulary that opens the sequence."""
GROUP = 8
BATCHES = 15
GENERATOR = torch.Generator().manual_seed(7)
VALUES = torch.rand(len(LENGTHS), max(LENGTHS), VOCAB, generator=GENERATOR)
BEST = sum(float(VALUES[c, :n].max(-1).values.mean()) for c, n in enumerate(LENGTHS)) / len(LENGTHS)


class Table(nn.Module):
    """A policy of one parameter for each context, position and token."""

    def __init__(self) -> None:
        super().__init__()
        # All equal is a uniform policy; not 0, since Adafactor's step is relative to the size of its parameter.
        self.scores = nn.Parameter(torch.ones(len(LENGTHS) * (max(LENGTHS) + 1), VOCAB))

    def hidden(self, tokens: Tensor) -> Tensor:
        place = tokens[:, :1] * (max(LENGTHS) + 1) + torch.arange(tokens.shape[1])
        return nn.functional.one_hot(place, len(self.scores)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.scores

    def log_probs(self, context: int) -> Tensor:
        """`[position, token]`."""
        start = context * (max(LENGTHS) + 1)
        return torch.log_softmax(self.scores.detach()[start : start + LENGTHS[context]], -1)

    def worth(self) -> float:
        """Expected score."""
        each = [(self.log_probs(c).exp() * VALUES[c, :n]).sum(-1).mean() for c, n in enumerate(LENGTHS)]
        return float(torch.stack(each).mean())


def sample(policy: Table, context: int, version: int, generator: torch.Generator) -> tuple[Sequence, float]:
    logp = policy.log_probs(context)
    tokens = torch.multinomial(logp.exp(), 1, generator=generator)
    number = LENGTHS[context]
    span = Span(
        start=1, end=1 + number, logprobs=tuple(logp.gather(-1, tokens)[:, 0].tolist()), versions=(version,) * number,
        temperature=1.0,
    )  # fmt: skip
    score = float(VALUES[context, :number].gather(-1, tokens).mean())
    return Sequence(tokens=(context, *tokens[:, 0].tolist()), spans=(span,)), score


def curve(optimization: Optimization, make: Callable[..., torch.optim.Optimizer], seed: int = 0) -> list[float]:
    """What the policy is worth after each update."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy, loss = Table(), objective(optimization)
    optimizer = make(policy.parameters(), lr=optimization.learning_rate)
    found = []
    initial = Table()
    for _ in range(BATCHES):
        version = len(found)
        items: list[Item] = []
        parts: list[Part] = []
        for context in [*range(len(LENGTHS))] * 2:
            members = [sample(policy, context, version, generator) for _ in range(GROUP)]
            tokens = GROUP * LENGTHS[context]
            parts.append(Part(GROUP, tokens, GROUP, tokens))
            weight = local_weight(
                optimization.average, LENGTHS[context], message_tokens=tokens,
                constant=optimization.constant_tokens or 0,
            )  # fmt: skip
            judged = advantages([score for _, score in members], optimization.advantage)
            items += [Item(sequence, value, weight) for (sequence, _), value in zip(members, judged, strict=True)]
        for _ in range(2):
            gradients = zero_gradients(policy)
            accumulate(
                policy, items, gradients, loss=loss, base_version=len(found),
                reference=initial if optimization.kl else None,
            )  # fmt: skip
            scale = commit_scale(optimization.average, parts)
            scaled = {name: gradient * scale for name, gradient in gradients.items()}
            apply_update(policy, optimizer, scaled, optimization.gradient_clip_norm)
            found.append(policy.worth())
    return found


@cache
def learnt(optimization: Optimization) -> tuple[float, ...]:
    return tuple(curve(optimization, torch.optim.AdamW))


def settings(loss, **more) -> Optimization:
    return Optimization(loss=loss, constant_tokens=max(LENGTHS), learning_rate=0.4, **more)


@pytest.mark.parametrize("average", ["execution", "token", "prompt", "constant"])
@pytest.mark.parametrize("loss", ["clip", "truncated", "sequence", "reinforce"])
def test_the_policy_reaches_the_known_optimum(loss, average) -> None:
    found = learnt(settings(loss, average=average))
    assert Table().worth() < 0.7 * BEST
    assert found[-1] >= 0.95 * BEST


@pytest.mark.parametrize(
    "more", [{"advantage": "loo"}, {"advantage": "no_std"}, {"max_age": 0}, {"kl": 0.001}, {"truncate": 1.5}]
)
def test_so_it_does_with_other_settings(more) -> None:
    assert learnt(settings("clip", **more))[-1] >= 0.95 * BEST


def test_so_it_does_with_the_lean_optimizer() -> None:
    assert curve(settings("clip"), torch.optim.Adafactor)[-1] >= 0.95 * BEST


def test_a_strong_pull_to_the_initial_policy_keeps_it_there() -> None:
    assert learnt(settings("clip", kl=10.0))[-1] < 0.8 * BEST


@pytest.mark.parametrize("loss", ["clip", "truncated", "sequence", "reinforce"])
def test_one_seed_is_one_curve(loss) -> None:
    again = tuple(curve(settings(loss), torch.optim.AdamW))
    assert again == learnt(settings(loss))
    assert tuple(curve(settings(loss), torch.optim.AdamW, seed=1)) != again


def test_a_canary_learns_nothing() -> None:
    """With a rate of 0 all stays as it was, whatever the optimizer remembers."""
    still = Optimization(learning_rate=0.0, weight_decay=0.1)
    assert set(curve(still, torch.optim.AdamW)) == {Table().worth()}
    assert set(curve(still, torch.optim.Adafactor)) == {Table().worth()}
