"""The absolute weight `w_e` of a trained token, fixed before anything is packed (four modes of averaging).

With weights that are absolute, parts can be summed in whatever batches, rows and ranks they come.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Average = Literal["execution", "token", "prompt", "constant"]
"""`execution`: inside an execution first, then over executions (the paper's). `token`: over all tokens. `prompt`:
inside a prompt first, then over prompts. `constant`: an execution's tokens over a number that is the same for all."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """An execution in a step. `tokens`: those that are trained, over all of its paths."""

    prompt: str
    tokens: int


def weights(rollouts: Sequence[Rollout], average: Average = "execution", constant: int = 0) -> list[float]:
    """Weight of each trained token of each execution of a step; 0 where it has none.

    The sum over all tokens is 1 for `token`; the share of executions or prompts that have tokens for `execution` and
    `prompt`; tokens over `executions * constant` for `constant`. Raises `ValueError` for a constant below 1.
    """
    number = len(rollouts)
    if average == "execution":
        return [1 / (number * rollout.tokens) if rollout.tokens else 0.0 for rollout in rollouts]
    if average == "token":
        total = sum(rollout.tokens for rollout in rollouts)
        return [1 / total if rollout.tokens else 0.0 for rollout in rollouts]
    if average == "prompt":
        prompts: Counter[str] = Counter()
        for rollout in rollouts:
            prompts[rollout.prompt] += rollout.tokens
        return [1 / (len(prompts) * prompts[r.prompt]) if r.tokens else 0.0 for r in rollouts]
    if constant < 1:
        raise ValueError(f"constant is {constant}; allowed are values from 1")
    return [1 / (number * constant) if rollout.tokens else 0.0 for rollout in rollouts]


def normalised(relative: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Relative weights of an execution's calls, scaled so that over its tokens (`tokens` of each call) they are 1 in
    the mean: what an execution weighs does not depend on how its tokens share it."""
    total = sum(weight * count for weight, count in zip(relative, tokens, strict=True))
    factor = sum(tokens) / total if total > 0 else 0.0
    return [weight * factor for weight in relative]
