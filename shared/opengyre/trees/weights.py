"""The absolute weight `w_e` of a trained token, fixed before anything is packed (four modes of averaging).

With weights that are absolute, parts can be summed in whatever batches, rows and ranks they come. What of a weight
needs the whole step is one factor, common to all its tokens, so it can be applied to the sum: `weights` is
`local_weight * commit_scale`, whatever the partition.
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


@dataclass(frozen=True, slots=True)
class Part:
    """What a step has of one message of a group: of its scored executions, and of their trained tokens, how many.

    `share`: how much of its group the message is, 1 unless members of the group come by other messages.
    """

    executions: int
    tokens: float
    of_executions: int
    of_tokens: float
    share: float = 1.0


def local_weight(
    average: Average, tokens: float, *, message_tokens: float = 0, share: float = 1.0, constant: int = 0
) -> float:
    """Weight of each trained token of an execution with `tokens` of them, up to the factor `commit_scale` of the step.

    Of the message that it came by, `prompt` needs the trained tokens, and the share of its group. 0 without tokens.
    Raises `ValueError` for a constant below 1.
    """
    if average == "constant" and constant < 1:
        raise ValueError(f"constant is {constant}; allowed are values from 1")
    if tokens == 0:
        return 0.0
    match average:
        case "execution":
            return 1 / tokens
        case "token":
            return 1.0
        case "prompt":
            return share / message_tokens
        case "constant":
            return 1 / constant


def commit_scale(average: Average, parts: Sequence[Part]) -> float:
    """What turns local weights into those of the step that these parts make up; 0 where they hold nothing to average.

    `execution`, `constant`: 1 over scored executions. `token`: 1 over trained tokens. `prompt`: 1 over groups, where a
    part of one counts for as much as it has of the group's tokens.
    """
    match average:
        case "execution" | "constant":
            total = sum(part.executions for part in parts)
        case "token":
            total = sum(part.tokens for part in parts)
        case "prompt":
            total = sum(_mass(part) for part in parts)
    return 1 / total if total else 0.0


def _mass(part: Part) -> float:
    """Of a message without tokens its executions count: it is a group that teaches nothing, not one that is not."""
    if part.of_tokens:
        return part.share * part.tokens / part.of_tokens
    return part.share * part.executions / part.of_executions if part.of_executions else 0.0


def normalised(relative: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Relative weights of an execution's calls, scaled so that over its tokens (`tokens` of each call) they are 1 in
    the mean: what an execution weighs does not depend on how its tokens share it."""
    total = sum(weight * count for weight, count in zip(relative, tokens, strict=True))
    factor = sum(tokens) / total if total > 0 else 0.0
    return [weight * factor for weight in relative]
