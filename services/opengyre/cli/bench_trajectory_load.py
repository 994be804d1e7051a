"""Executions to measure with: a main agent that compacts its history, and sub-agents, as an endpoint sees them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opengyre.trees import Given
from opengyre.trees.blocks import Tokens

VOCABULARY = 150_000
SAMPLED = 0.3
"""Share of the new tokens that the model samples."""
SHARED = 40
"""Tokens with which all system prompts begin."""


@dataclass(frozen=True, slots=True)
class Shape:
    """New tokens, model calls, sub-agents and compactions of an execution; sub-agents make three of seven calls."""

    tokens: int
    calls: int
    sub_agents: int = 12
    compactions: int = 5
    vocabulary: int = VOCABULARY

    def times(self, factor: int) -> "Shape":
        """As long again and again, with contexts of the same size."""
        return Shape(
            self.tokens * factor, self.calls * factor, self.sub_agents * factor,
            (self.compactions + 1) * factor - 1, self.vocabulary,
        )  # fmt: skip


def execution(shape: Shape, seed: int = 0, name: str = "") -> Iterator[Given]:
    """The calls with their whole prompts, nothing declared, in the order in which they are made.

    The sub-agents work in turns with the main agent. A compaction is asked for as one more message of the main agent,
    and what it sums up begins the next context.
    """
    rng = np.random.default_rng(seed)
    per_call = shape.tokens / shape.calls
    mine, theirs = _ids(rng, SHARED, shape), [_ids(rng, SHARED, shape) for _ in range(shape.sub_agents)]
    shared = _ids(rng, SHARED, shape)
    windows = shape.compactions + 1
    sub_calls = (shape.calls * 3 // 7) // shape.sub_agents if shape.sub_agents else 0
    main_calls = shape.calls - sub_calls * shape.sub_agents
    task = np.concatenate([shared, mine])
    context = [task, *([_EMPTY] * shape.sub_agents)]
    places = [0] * main_calls + [1 + n // sub_calls for n in range(sub_calls * shape.sub_agents)]
    order = sorted(range(len(places)), key=lambda n: (_moment(n, main_calls, sub_calls, shape), n))
    done = 0
    for number, which in enumerate(order):
        agent = places[which]
        if not len(context[agent]):
            context[agent] = np.concatenate([shared, theirs[agent - 1]])
        new = _ids(rng, max(1, int(per_call * (1 - SAMPLED))), shape)
        sampled = _ids(rng, max(5, int(per_call * SAMPLED)), shape)
        prompt = np.concatenate([context[agent], new])
        yield Given(f"{name}c{number:05d}", prompt, sampled, order=number)
        context[agent] = np.concatenate([prompt, sampled])
        if agent == 0:
            done += 1
            if done % (main_calls // windows) == 0 and done < main_calls - windows:
                context[0] = np.concatenate([task, sampled[: max(4, len(sampled))]])


_EMPTY = np.empty(0, np.int32)


def _moment(number: int, main_calls: int, sub_calls: int, shape: Shape) -> float:
    """When a call is made: the main agent's evenly over the execution, a sub-agent's close to one another."""
    if number < main_calls:
        return number / main_calls
    agent, turn = divmod(number - main_calls, sub_calls)
    return (agent + 0.5 + 2 * turn / sub_calls) / (shape.sub_agents + 2)


def _ids(rng: np.random.Generator, count: int, shape: Shape) -> Tokens:
    return rng.integers(1, shape.vocabulary, size=count, dtype=np.int32)
