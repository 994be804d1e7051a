"""Weights of tokens: a factor that is known where the token is, times one that is known at the commit."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.trees.weights import Part, Rollout, commit_scale, local_weight, weights

AVERAGES = ("execution", "token", "prompt", "constant")
CONSTANT = 7


@dataclass(frozen=True)
class Message:
    """Scored executions of one group by their trained tokens, out of `slots` of the group's `size`."""

    group: str
    tokens: tuple[int, ...]
    slots: int
    size: int

    @property
    def share(self) -> float:
        return self.slots / self.size

    def part(self, members: tuple[int, ...]) -> Part:
        """Of these members, by number."""
        return Part(
            executions=len(members),
            tokens=sum(self.tokens[n] for n in members),
            of_executions=len(self.tokens),
            of_tokens=sum(self.tokens),
            share=self.share,
        )


def found(average, messages: list[Message]) -> list[float]:
    """Weight of each trained token of each execution."""
    scale = commit_scale(average, [message.part(tuple(range(len(message.tokens)))) for message in messages])
    return [
        scale
        * local_weight(average, tokens, message_tokens=sum(message.tokens), share=message.share, constant=CONSTANT)
        for message in messages
        for tokens in message.tokens
    ]


groups = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=5)


@pytest.mark.parametrize("average", AVERAGES)
@given(groups)
def test_they_are_those_of_the_whole_step(average, drawn: list[list[int]]) -> None:
    """Executions without a score take places in their groups, and nothing else."""
    messages = [Message(f"g{n}", tuple(tokens), len(tokens) + 1, len(tokens) + 1) for n, tokens in enumerate(drawn)]
    rollouts = [Rollout(message.group, tokens) for message in messages for tokens in message.tokens]
    assert found(average, messages) == pytest.approx(weights(rollouts, average, CONSTANT))


@pytest.mark.parametrize("average", AVERAGES)
@given(groups, st.data())
def test_contributions_in_whatever_partition_add_up_to_the_loss_of_the_step(average, drawn, data) -> None:
    """Each cell sums locally weighted tokens of the executions that it was given; the commit scales the sum."""
    messages = [Message(f"g{n}", tuple(tokens), len(tokens), len(tokens)) for n, tokens in enumerate(drawn)]
    units = [(message, n) for message in messages for n in range(len(message.tokens))]
    cell_of = data.draw(st.lists(st.integers(0, 3), min_size=len(units), max_size=len(units)))
    losses = data.draw(st.lists(st.floats(-2, 2), min_size=len(units), max_size=len(units)))
    cells = dict.fromkeys(cell_of, 0.0)
    for (message, n), cell, loss in zip(units, cell_of, losses, strict=True):
        weight = local_weight(
            average, message.tokens[n], message_tokens=sum(message.tokens), share=message.share, constant=CONSTANT
        )
        cells[cell] += weight * message.tokens[n] * loss
    scale = commit_scale(average, [message.part(tuple(range(len(message.tokens)))) for message in messages])
    rollouts = [Rollout(message.group, message.tokens[n]) for message, n in units]
    reference = sum(
        weight * rollout.tokens * loss
        for weight, rollout, loss in zip(weights(rollouts, average, CONSTANT), rollouts, losses, strict=True)
    )
    assert scale * sum(cells.values()) == pytest.approx(reference, abs=1e-9)


@given(st.lists(st.integers(1, 50), min_size=8, max_size=8), st.integers(2, 7))
def test_a_late_member_counts_as_its_share_of_a_group(tokens: list[int], closing: int) -> None:
    """Group means: seven of eight and the eighth, in one step, weigh together what a whole group weighs."""
    other = Message("g1", (3, 5), 2, 2)
    early, late = (
        Message("g0", tuple(tokens[:closing]), closing, 8),
        Message("g0", tuple(tokens[closing:]), 8 - closing, 8),
    )
    each = found("prompt", [early, late, other])
    first = sum(weight * count for weight, count in zip(each[:8], tokens, strict=True))
    second = sum(weight * count for weight, count in zip(each[8:], other.tokens, strict=True))
    assert (first, second) == (pytest.approx(0.5), pytest.approx(0.5))


@pytest.mark.parametrize("average", ["execution", "token", "prompt"])
def test_a_message_that_straddles_two_updates_weighs_one_in_each(average) -> None:
    """The sum of weights over an update is 1 whatever part of a message is in it."""
    message, other = Message("g0", (4, 10, 2), 3, 3), Message("g1", (5, 5), 2, 2)
    for members in ((0, 1), (2,)):
        scale = commit_scale(average, [message.part(members), other.part((0, 1))])
        total = sum(
            local_weight(average, one.tokens[n], message_tokens=sum(one.tokens), share=one.share) * one.tokens[n]
            for one, chosen in ((message, members), (other, (0, 1)))
            for n in chosen
        )
        assert scale * total == pytest.approx(1.0)


def test_nothing_to_average_has_no_weight() -> None:
    for average in AVERAGES:
        assert commit_scale(average, []) == 0.0
        assert local_weight(average, 0, constant=1) == 0.0
    assert commit_scale("prompt", [Part(0, 0, 0, 0)]) == 0.0
    assert commit_scale("token", [Part(3, 0, 3, 0)]) == 0.0
    with pytest.raises(ValueError, match="constant is 0; allowed are values from 1"):
        local_weight("constant", 4)
