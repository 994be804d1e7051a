"""What an emulated call says: tokens and log-probs as a function of its seed and the tokens' absolute positions.

So a call that was stopped after some tokens and goes on elsewhere, with its partial completion as the prompt's end,
gives the tokens of the unbroken call, whatever the accelerators did. The noise is that of `opengyre.tiny.sampling`.
"""

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
FIRST: Final = 16
"""Tokens below are left to the tokenizer's special ones."""
DEEPEST: Final = 4.0
"""Log-probs lie in `[-DEEPEST, 0)`, evenly."""


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, modulo 2**64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def noise(seed: int, start: int, count: int) -> NDArray[np.uint64]:
    """64 random bits for each of the positions `start` to `start + count - 1` under `seed`."""
    base = _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))
    return _mix(base + np.arange(start, start + count, dtype=np.uint64) * np.uint64(_GOLDEN))


@functools.lru_cache(maxsize=64)
def _said(vocabulary: int, stops: tuple[int, ...]) -> NDArray[np.int64]:
    """The tokens that may be said, in order."""
    first = max(0, min(FIRST, vocabulary - 1))
    said = np.setdiff1d(np.arange(first, vocabulary), np.array(stops, dtype=np.int64))
    if not len(said):
        raise ValueError(f"the vocabulary of {vocabulary} has no token that is not a stop token")
    return said


def draw(
    seed: int, start: int, count: int, vocabulary: int, stops: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and log-probs of `count` positions from `start`; none of them is a stop token.

    Raises `ValueError` where the vocabulary has no token that may be said.
    """
    said = _said(vocabulary, stops)
    bits = noise(seed, start, count)
    tokens = said[(bits >> np.uint64(32)) % np.uint64(len(said))]
    logprobs = -DEEPEST * ((bits & np.uint64(0xFFFFFFFF)).astype(np.float64) + 1) / (1 << 32)
    return tuple(tokens.tolist()), tuple(logprobs.tolist())
