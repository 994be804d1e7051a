"""The numbers of a call's tokens in a tree in which something is dressed (`keys`), and where they begin.

A call goes on from its parent's nodes as far as it stands in the same things. With another adapter it begins at the
root. With rows of its own for tokens of the prefix, which a prefill that did not find them in a cache gives, it leaves
the parent's path there, for these rows are what its own log-probs were taken under.
"""

from dataclasses import dataclass

import numpy as np

from opengyre.trees.blocks import Tokens
from opengyre.trees.calls import Given
from opengyre.trees.keys import Dress, Rows, cut
from opengyre.trees.trie import ROOT, Position, Trie


@dataclass(frozen=True, slots=True)
class Before:
    """What a call declares to go on from: the first `prefix` tokens of a path that ends at `at`."""

    at: Position = ROOT
    adapter: str | None = None
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True, slots=True)
class Dressed:
    """`numbers`: of the tokens after `before`; the last `sampled` of them were sampled. `rows`: of the whole path, in
    order and without overlap."""

    before: Position
    prompt: Tokens
    sampled: Tokens
    rows: tuple[Rows, ...]


def wanted(given: Given) -> bool:
    """Whether the call has anything of that kind."""
    return given.adapter is not None or bool(given.media) or given.rows is not None


def dress(trie: Trie, given: Given, before: Before) -> Dressed:
    """`before.at` has the depth of the prefix."""
    keys, prefix = trie.keys, before.at.depth
    same = before.adapter == given.adapter
    end = prefix + len(given.prompt) + len(given.sampled)
    rows, start = before.rows if same else (), prefix if same else 0
    if given.rows is not None:
        start = min(start, given.rows.start + 1)
        own = cut((given.rows,), 0, end)
        rows = (*cut(rows, 0, min(prefix, given.rows.start)), *own)
    else:
        rows = cut(rows, 0, prefix)
    media = dict(given.media)
    old = trie.tokens(before.at, start).tolist() if start < prefix else []
    new = [*map(int, given.prompt), *map(int, given.sampled)]
    by_place = _by_place(rows, start)
    found: list[int] = []
    for place, token in enumerate([*old, *new], start):
        was = keys.dress(token)
        found.append(
            keys.number(
                Dress(
                    was.token,
                    given.adapter if place == 0 else None,
                    media.get(place, was.media),
                    by_place.get(place - 1),
                )
            )
        )
    numbers = np.array(found, np.int32)
    asked = len(numbers) - len(given.sampled)
    return Dressed(trie.prefix(before.at, start), numbers[:asked], numbers[asked:], rows)


def _by_place(rows: tuple[Rows, ...], start: int) -> dict[int, tuple[str, int]]:
    return {
        place: (one.blob, one.first + place - one.start)
        for one in rows
        for place in range(max(one.start, start - 1), one.end)
    }
