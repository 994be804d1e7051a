"""What makes the node of a token beside the tokens before it: adapter, media, recorded routes of experts.

Two calls share a node only if all that its log-prob depends on is the same. A tree is made of numbers: of a token as it
is, its id; of one that is *dressed* with something of that kind, a negative number that stands for it (ids are never
negative). So trees without such things cost nothing more, and those with them are the same trees.

- The adapter dresses the first token: with it all that follow are other nodes.
- Media dress the token where they begin.
- The routes that were recorded for a token decide what its successors see, not its own log-prob. So a token is dressed
  with the row of the one *before* it. The last token of a completion was never run through the model when the call
  ended: its row comes with the prefill of the call that goes on from there, and dresses that call's first token.

Rows are known by their blob's hash and place in it: equal rows in different blobs are taken for different, which costs
sharing and never merges what is not the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from opengyre.trees.blocks import Tokens


class Rows(NamedTuple):
    """Rows of recorded routes: of the tokens `[start, end)` of a path, rows from `first` on of a blob."""

    blob: str
    start: int
    end: int
    first: int = 0


class Dress(NamedTuple):
    """A token and what it stands in."""

    token: int
    adapter: str | None = None
    media: str | None = None
    row: tuple[str, int] | None = None


class Keys:
    """The dressed tokens of a tree, each with its number below 0."""

    def __init__(self) -> None:
        self._numbers: dict[Dress, int] = {}
        self._dresses: list[Dress] = []

    def __bool__(self) -> bool:
        return bool(self._dresses)

    def number(self, dress: Dress) -> int:
        """The token itself where it is not dressed."""
        if dress[1:] == (None, None, None):
            return dress.token
        found = self._numbers.setdefault(dress, -1 - len(self._dresses))
        if found == -1 - len(self._dresses):
            self._dresses.append(dress)
        return found

    def dress(self, number: int) -> Dress:
        return Dress(number) if number >= 0 else self._dresses[-1 - number]

    def plain(self, numbers: Tokens) -> Tokens:
        """As token ids."""
        if not self._dresses or not len(numbers) or int(numbers.min()) >= 0:
            return numbers
        found = numbers.copy()
        for place in np.flatnonzero(numbers < 0):
            found[place] = self.dress(int(numbers[place])).token
        return found

    def media(self, numbers: Tokens) -> tuple[tuple[int, str], ...]:
        """Place and hash of each of the media on a path."""
        found: list[tuple[int, str]] = []
        for place in np.flatnonzero(numbers < 0) if self._dresses else ():
            media = self.dress(int(numbers[place])).media
            if media is not None:
                found.append((int(place), media))
        return tuple(found)


def cut(rows: Sequence[Rows], start: int, end: int) -> tuple[Rows, ...]:
    """What of `rows` is within `[start, end)`."""
    found = (
        Rows(one.blob, max(one.start, start), min(one.end, end), one.first + max(0, start - one.start)) for one in rows
    )
    return tuple(one for one in found if one.start < one.end)


def covers(rows: Sequence[Rows], end: int) -> bool:
    """Whether each token of `[0, end)` has its row; `rows` in order and without overlap."""
    place = 0
    for one in rows:
        if one.start != place:
            return False
        place = one.end
    return place >= end
