"""The tree of one execution's calls, whatever order they come in.

States of a call: waiting (its parent has not come) -> placed; refused (it has no place: its ids are no ids, it claims
more of its parent than there is, its parent never came, or its id came with two contents). `add` places a call at the
cost of its new tokens: a call that tells its parent and prefix is compared with what goes on from there only; a whole
prompt is compared with the path that it follows in memory, block hashes finding the place where that leads through
many forks.

Invariants: the result is a function of the set of calls: shuffled or repeated calls make the same one. Each call is a
node or is counted as refused. The tokens of the path to a node are its prompt and completion. Nothing is recursive: an
execution may have thousands of calls.
"""

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from opengyre.trees.blocks import Tokens
from opengyre.trees.calls import MAX_TOKEN, BadTokensError, Figures, Given, Node, ids
from opengyre.trees.dressing import Before, dress, wanted
from opengyre.trees.keys import Rows, covers
from opengyre.trees.lineage import Texts, relate
from opengyre.trees.trie import ROOT, Position, Trie

Added = Literal["placed", "waiting", "duplicate", "conflict", "refused"]


@dataclass(frozen=True, slots=True)
class _Placed:
    given: Given
    start: Position
    end: Position
    rows: tuple[Rows, ...] = ()
    asked: object = None
    gap: bool = False
    """Some token that its log-probs depend on has no row, though it has rows itself."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What was made of the calls. `nodes` in the order of the log; `lost`: call -> why it has no place."""

    trie: Trie
    nodes: tuple[Node, ...]
    lost: dict[str, str]

    def tokens(self, node: Node) -> Tokens:
        """Prompt and completion, `[node.length]`."""
        return self.trie.ids(node.end)

    def media(self, node: Node) -> tuple[tuple[int, str], ...]:
        """Place and hash of each of the media of its path."""
        return self.trie.keys.media(self.trie.tokens(node.end)) if self.trie.keys else ()

    @property
    def figures(self) -> Figures:
        refused = Counter(self.lost.values())
        refused.update(node.refused for node in self.nodes if node.refused is not None)
        kinds = Counter(node.kind for node in self.nodes if node.kind != "root")
        return Figures(
            calls=len(self.nodes) + len(self.lost),
            events=sum(node.events for node in self.nodes),
            path_tokens=sum(node.length for node in self.nodes),
            unique_nodes=self.trie.size,
            leaves=self.trie.leaves,
            refused=dict(sorted(refused.items())),
            transitions=dict(sorted(kinds.items())),
            doubled=sum(node.doubled > 0 for node in self.nodes),
            diagnoses=dict(sorted(Counter(n.diagnosis for n in self.nodes if n.diagnosis is not None).items())),
        )


@dataclass(slots=True)
class Builder:
    """Takes calls as they come; `tree` may be asked for at any time."""

    texts: Texts = field(default_factory=Texts)
    vocabulary: int | None = None
    """How many ids there are; None: not known. A call with others is refused."""
    _trie: Trie = field(default_factory=Trie)
    _placed: dict[str, _Placed] = field(default_factory=dict)
    _waiting: dict[str, dict[str, Given]] = field(default_factory=dict)
    """Parent -> those that wait for it."""
    _given: dict[str, Given] = field(default_factory=dict)
    """All that have no place."""
    _lost: dict[str, str] = field(default_factory=dict)
    _conflicts: set[str] = field(default_factory=set)

    def add(self, given: Given) -> Added:
        """Take a call. One that came before changes nothing; the same id with another content makes both refused."""
        name = given.call
        if name in self._conflicts:
            return "conflict"
        if name in self._placed or name in self._given:
            if self._same(given):
                return "duplicate"
            self._conflicts.add(name)
            return "conflict"
        try:
            most = MAX_TOKEN if self.vocabulary is None else self.vocabulary - 1
            given = _replace(given, ids(given.prompt, most), ids(given.sampled, most))
        except BadTokensError:
            self._given[name] = given
            self._lost[name] = "token_id"
            return "refused"
        if given.prefix and (given.prefix < 0 or given.parent is None):
            self._given[name] = given
            self._lost[name] = "prefix_length"
            return "refused"
        if given.prefix and given.parent not in self._placed:
            self._given[name] = given
            self._waiting.setdefault(given.parent or "", {})[name] = given
            return "waiting"
        return self._place(given)

    def _place(self, given: Given) -> Added:
        """Place it and all that waited for it."""
        first: Added | None = None
        ready = deque([given])
        while ready:
            one = ready.popleft()
            added = self._place_one(one)
            first = first or added
            if added == "placed":
                ready.extend(self._waiting.pop(one.call, {}).values())
        assert first is not None
        return first

    def _place_one(self, given: Given) -> Added:
        self._given.pop(given.call, None)
        before = ROOT
        if given.prefix:
            parent = self._placed[given.parent or ""].end
            if given.prefix > parent.depth:
                self._given[given.call] = given
                self._lost[given.call] = "prefix_length"
                return "refused"
            before = self._trie.prefix(parent, given.prefix)
        if self._trie.keys or wanted(given):
            self._placed[given.call] = self._place_dressed(given, before)
            return "placed"
        start = self._trie.insert(before, np.asarray(given.prompt))
        end = self._trie.insert(start, np.asarray(given.sampled)) if len(given.sampled) else start
        self._placed[given.call] = _Placed(_light(given), start, end)
        return "placed"

    def _place_dressed(self, given: Given, before: Position) -> _Placed:
        declared = self._placed.get(given.parent or "") if given.prefix else None
        whence = Before(before, declared.given.adapter, declared.rows) if declared is not None else Before()
        if declared is None:
            whence = Before(ROOT, given.adapter)
        dressed = dress(self._trie, given, whence)
        start = self._trie.insert(dressed.before, dressed.prompt)
        end = self._trie.insert(start, dressed.sampled)
        asked: object = None
        gap = False
        if given.rows is not None:
            asked = (given.adapter, self._trie.ids(start).tobytes())
            gap = not covers(dressed.rows, end.depth - 1)
        return _Placed(_light(given), start, end, dressed.rows, asked, gap)

    def _same(self, given: Given) -> bool:
        name = given.call
        before = self._placed[name].given if name in self._placed else self._given[name]
        for of in ("parent", "order", "fault", "role", "kind", "execution", "agent", "wanted", "payload",
                   "adapter", "media", "rows"):  # fmt: skip
            if getattr(before, of) != getattr(given, of):
                return False
        if (before.prefix or 0) != (given.prefix or 0):
            return False
        placed = self._placed.get(name)
        if placed is None:
            return _equal(before.prompt, given.prompt) and _equal(before.sampled, given.sampled)
        from_ = given.prefix or 0
        tokens = self._trie.ids(placed.end, from_)
        size = placed.start.depth - from_
        return np.array_equal(tokens[:size], given.prompt) and np.array_equal(tokens[size:], given.sampled)

    def tree(self) -> Tree:
        """What the calls so far make; those that still wait are refused as `parent_missing`."""
        lost = {name: self._lost.get(name, "parent_missing") for name in self._given}
        lost |= dict.fromkeys(self._conflicts, "conflicting_call")
        trie, placed = (self._trie, self._placed) if not self._conflicts else self._without(lost)
        ordered = sorted(placed.values(), key=lambda one: (one.given.order, one.given.call))
        nodes = [
            Node(
                one.given,
                one.start,
                one.end,
                refused=one.given.fault or ("routes_gap" if one.gap else None),
                rows=one.rows,
                asked=one.asked,
            )
            for one in ordered
        ]
        executions: dict[str, list[Node]] = defaultdict(list)
        for node in nodes:
            executions[node.given.execution].append(node)
        for own in executions.values():
            relate(trie, own, self.texts)
        return Tree(trie, tuple(nodes), dict(sorted(lost.items())))

    def _without(self, lost: dict[str, str]) -> tuple[Trie, dict[str, _Placed]]:
        """The tree without calls in conflict and what is known by them only. It is made anew, so that nothing is left
        of their tokens."""
        waiting: dict[str, list[str]] = {}
        for name, one in self._placed.items():
            if one.given.prefix and one.given.parent is not None:
                waiting.setdefault(one.given.parent, []).append(name)
        gone = sorted(self._conflicts)
        for name in gone:
            new = [child for child in waiting.pop(name, []) if child not in self._conflicts]
            lost.update(dict.fromkeys(new, "parent_missing"))
            gone.extend(new)
        for name, one in self._given.items():
            # Whether the parent was long enough depends on which of two contents came first.
            if one.parent in gone and one.prefix and one.prefix > 0 and lost[name] == "prefix_length":
                lost[name] = "parent_missing"
        trie, kept = Trie(), {}
        trie.keys = self._trie.keys
        for name, one in self._placed.items():
            if name not in lost:
                tokens = self._trie.tokens(one.end)
                start = trie.insert(ROOT, tokens[: one.start.depth])
                end = trie.insert(start, tokens[one.start.depth :])
                kept[name] = dataclasses.replace(one, start=start, end=end)
        return trie, kept


def _replace(given: Given, prompt: Tokens, sampled: Tokens) -> Given:
    return dataclasses.replace(given, prompt=prompt, sampled=sampled)


def _equal(left: Tokens | Sequence[int], right: Tokens | Sequence[int]) -> bool:
    return left is right or list(left) == list(right)


_NONE = np.empty(0, np.int32)


def _light(given: Given) -> Given:
    """Without its tokens, which the tree has: nothing is kept of whole prompts."""
    return _replace(given, _NONE, _NONE)


def build(calls: Iterable[Given], texts: Texts | None = None) -> Tree:
    """The tree of `calls`."""
    builder = Builder(texts or Texts())
    for given in calls:
        builder.add(given)
    return builder.tree()
