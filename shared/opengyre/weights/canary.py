"""A version's canary: a few prompts and the log-probs that the trainer's forward gives their tokens.

It is a file of the version, so its manifest vouches for it. Whoever serves the version scores the same prompts and
compares: a checksum says that files are what they were, not that an engine computes by them. Pure but for reading the
file; needs no torch.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from opengyre.weights.manifest import ChecksumError

CANARY_FILE: Final = "canary.json"
PROMPTS: Final = 8
TOKENS: Final = 12
"""Of each prompt: fewer than the smallest context of an engine."""
DECIMALS: Final = 4
"""Log-probs are rounded, so that what is computed again is written as the same bytes."""


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`logprobs[i]` are of all tokens of `prompts[i]` but the first, in nats at temperature 1."""

    prompts: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.prompts or [len(prompt) - 1 for prompt in self.prompts] != [len(one) for one in self.logprobs]:
            raise ValueError("it has not one log-prob for each token but the first of a prompt")
        if min(map(len, self.prompts)) < 2:
            raise ValueError("a prompt has fewer than two tokens")


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences in nats, over all scored tokens."""

    mean: float
    largest: float


def prompts_for(vocabulary: int, context: int = TOKENS) -> tuple[tuple[int, ...], ...]:
    """The same for each version of a model. Tokens are drawn evenly: rows of the embeddings that a usual text does not
    touch are part of the weights, too."""
    drawn = random.Random(vocabulary)  # noqa: S311 - no secret
    length = min(TOKENS, context)
    return tuple(tuple(drawn.randrange(vocabulary) for _ in range(length)) for _ in range(PROMPTS))


def encode(prompts: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> bytes | None:
    """Content of the file; None where the model's log-probs are not finite, so that there is nothing to compare."""
    if not all(math.isfinite(value) for one in logprobs for value in one):
        return None
    rounded = [[round(value, DECIMALS) for value in one] for one in logprobs]
    return json.dumps({"prompts": [list(prompt) for prompt in prompts], "logprobs": rounded}).encode() + b"\n"


def read_canary(directory: Path) -> Canary | None:
    """That of the version in `directory`, None where it has none. Raises `ChecksumError` for one that is not one."""
    path = directory / CANARY_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ChecksumError(f"{path} is no canary: {error}", path) from error


def gap(canary: Canary, scored: Sequence[Sequence[float]]) -> Gap:
    """How far what an engine scored is from the trainer's; infinite where it gave no number."""
    pairs = zip(canary.logprobs, scored, strict=True)
    off = [abs(a - b) for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True)]
    if not all(map(math.isfinite, off)):
        return Gap(math.inf, math.inf)
    return Gap(sum(off) / len(off), max(off))
