"""Rolling 128-bit hashes of prefixes, one for each block of 256 tokens.

The hash of a prefix is `sum_i token_i * r_i` in two lanes modulo 2**64, with odd random coefficients that are drawn
for each process, so that nobody can write a prompt that collides. Sums are associative: the hash at any depth is the
hash at a lower depth plus what lies between, which is why extending a path costs its new tokens only. Two different
prefixes have one hash with a probability below 2**-80 (token ids are below 2**31); nothing that is decided depends on
the coefficients otherwise.
"""

import secrets
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 256
Tokens = NDArray[np.int32]
Lanes = NDArray[np.uint64]
"""`[..., 2]`: the two lanes of a hash."""


class _Coefficients:
    """Grows as longer paths come; trees are built in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rng = np.random.default_rng(secrets.randbits(128))
        self._drawn: Lanes = np.empty((2, 0), dtype=np.uint64)

    def upto(self, length: int) -> Lanes:
        """`[2, at least length]`, always the same."""
        if self._drawn.shape[1] < length:
            with self._lock:
                have = self._drawn.shape[1]
                if have < length:
                    size = (2, max(length - have, have, 1 << 14))
                    more = self._rng.integers(0, 1 << 64, size=size, dtype=np.uint64) | np.uint64(1)
                    self._drawn = np.concatenate([self._drawn, more], axis=1)
        return self._drawn


_COEFFICIENTS: Final = _Coefficients()


def advance(before: Lanes, tokens: Tokens, depth: int) -> tuple[Lanes, Lanes]:
    """Hashes at the block boundaries within `(depth, depth + len(tokens)]`, `[boundaries, 2]`, and at the end, `[2]`;
    `before` is the hash at `depth`."""
    end = depth + len(tokens)
    if not len(tokens):
        return np.empty((0, 2), dtype=np.uint64), before
    wide = tokens.astype(np.uint64)
    factors = _COEFFICIENTS.upto(end)[:, depth:end]
    boundaries = np.arange(-(-(depth + 1) // BLOCK) * BLOCK, end + 1, BLOCK) - depth
    starts = np.concatenate([[0], boundaries[boundaries < len(tokens)]])
    sums = np.stack([np.add.reduceat(wide * lane, starts) for lane in factors], axis=1)
    totals = before + np.cumsum(sums, axis=0)
    return totals[: len(boundaries)], totals[-1]


def key(lanes: Lanes) -> int:
    """A hash as one number."""
    return int(lanes[0]) << 64 | int(lanes[1])
