"""The calls of one execution as a tree of tokens, and its root-to-leaf paths as training sequences. Pure.

A call carries only what its prompt adds after `prefix_tokens` tokens of its parent's prompt and completion. It extends
its parent when that prefix is the whole of it, else it forks off inside. A leaf is a call that none extends; each leaf
is one sequence. The tokens that a call sampled are trained in the first leaf below it, in log order, and are context
everywhere else, so that a sampled token has a loss in at most one place.

Invariants: every call is in a sequence or is counted as refused, with a reason; a refused call whose tokens are known
still serves as context. Iterative throughout: an execution may have thousands of calls.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opengyre.proto import group
from opengyre.proto.traj import Call

LOGPROB_CEILING = 1e-4
"""A log-prob above this is none; rounding may leave one slightly above 0."""


@dataclass(frozen=True, slots=True)
class Paths:
    """`refused`: reason -> calls that are not trained. `path_tokens`: prompts and completions without sharing."""

    sequences: tuple[group.Sequence, ...]
    refused: dict[str, int]
    trained_tokens: int
    path_tokens: int


@dataclass(slots=True)
class _Node:
    call: Call
    parent: "_Node | None"
    start: int
    """Length of the full prompt: where the sampled tokens begin."""
    children: "list[_Node]" = field(default_factory=list)
    extended_by: "list[_Node]" = field(default_factory=list)
    refusal: str | None = None
    claimed: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.call.sampled_ids)


def fault_of(call: Call) -> str | None:
    """Why this call's tokens cannot be trained, looking at the call alone; None if they can."""
    sampled = len(call.sampled_ids)
    if sampled == 0:
        return "empty_completion"
    if call.prefix_tokens + len(call.prompt_ids) == 0:
        return "empty_prompt"
    if len(call.logprobs) != sampled:
        return "logprobs_length"
    if not all(math.isfinite(value) and value <= LOGPROB_CEILING for value in call.logprobs):
        return "logprobs_value"
    if min(call.sampled_ids) < 0 or min(call.prompt_ids, default=0) < 0:
        return "token_id"
    if not (math.isfinite(call.temperature) and call.temperature > 0):
        return "temperature"
    place = 0
    for span in call.versions:
        if span.start != place or span.end < span.start or span.version < 0:
            return "version_spans"
        place = span.end
    return None if place == sampled else "version_spans"


def paths(calls: Sequence[Call]) -> Paths:
    """Sequences of the calls of one execution, in log order. A repeated call (same id and content) counts once."""
    unique, refused = _unique(calls)
    nodes, lost = _attach(unique)
    refused.update(lost)
    for node in nodes:
        node.refusal = fault_of(node.call)
    _supersede(nodes)
    refused.update(node.refusal for node in nodes if node.refusal is not None)
    # Leaves that train come first, so that a refused one does not take its ancestors' tokens along a path of its own.
    leaves = sorted((node for node in nodes if not node.extended_by), key=lambda node: node.refusal is not None)
    sequences = tuple(_sequence(leaf) for leaf in leaves)
    kept = tuple(sequence for sequence in sequences if sequence.spans)
    return Paths(
        sequences=kept,
        refused=dict(sorted(refused.items())),
        trained_tokens=sum(span.end - span.start for sequence in kept for span in sequence.spans),
        path_tokens=sum(node.end for node in nodes),
    )


def _unique(calls: Iterable[Call]) -> tuple[list[Call], Counter[str]]:
    """Each call id once; an id with two contents is refused with all that bears it."""
    seen: dict[str, Call] = {}
    conflicts: set[str] = set()
    for call in calls:
        before = seen.setdefault(call.call, call)
        if before != call:
            conflicts.add(call.call)
    refused = Counter({"conflicting_call": len(conflicts)} if conflicts else {})
    return [call for name, call in seen.items() if name not in conflicts], refused


def _attach(calls: list[Call]) -> tuple[list[_Node], Counter[str]]:
    """Nodes in log order; what has no known parent, or claims more of it than there is, cannot be rebuilt."""
    nodes: dict[str, _Node] = {}
    refused: Counter[str] = Counter()
    for call in calls:
        parent = nodes.get(call.parent) if call.parent is not None else None
        if call.parent is not None and parent is None:
            refused["parent_missing"] += 1
            continue
        if not 0 <= call.prefix_tokens <= (parent.end if parent else 0):
            refused["prefix_length"] += 1
            continue
        node = _Node(call=call, parent=parent, start=call.prefix_tokens + len(call.prompt_ids))
        nodes[call.call] = node
        if parent is not None:
            parent.children.append(node)
            if call.prefix_tokens == parent.end:
                parent.extended_by.append(node)
    return list(nodes.values()), refused


def _supersede(nodes: list[_Node]) -> None:
    """Of several calls with the same prompt, those that were gone on from are live; if none was, the last is."""
    attempts: dict[tuple[str | None, int, tuple[int, ...]], list[_Node]] = {}
    for node in nodes:
        key = (node.call.parent, node.call.prefix_tokens, node.call.prompt_ids)
        attempts.setdefault(key, []).append(node)
    for same in attempts.values():
        used = [node for node in same if node.extended_by] or same[-1:]
        for node in same:
            if node not in used:
                node.refusal = node.refusal or "superseded"


def _sequence(leaf: _Node) -> group.Sequence:
    """Tokens from the root to `leaf`, with the spans on this path that no earlier leaf has claimed; it ends with the
    last of them, since what follows has no part in the loss."""
    pieces: list[tuple[int, ...]] = []
    spans: list[group.Span] = []
    node: _Node | None = leaf
    length = leaf.end
    whole = True
    while node is not None:
        # Below a fork only the first `length` tokens of an ancestor are on the path.
        own = node.call.prefix_tokens
        if length > own:
            pieces.append((*node.call.prompt_ids, *node.call.sampled_ids)[: length - own])
        if whole and node.refusal is None and not node.claimed:
            node.claimed = True
            spans.append(_span(node))
        length = min(length, own)
        whole = whole and node.parent is not None and own == node.parent.end
        node = node.parent
    used = spans[0].end if spans else 0
    tokens = itertools.islice(itertools.chain.from_iterable(reversed(pieces)), used)
    return group.Sequence(tokens=tuple(tokens), spans=tuple(reversed(spans)))


def _span(node: _Node) -> group.Span:
    call = node.call
    versions = tuple(span.version for span in call.versions for _ in range(span.start, span.end))
    return group.Span(
        start=node.start, end=node.end, logprobs=call.logprobs, versions=versions, temperature=call.temperature
    )
