"""The calls of one execution as training sequences: the tree of tokens, and the paths of it that are trained. Pure.

A call carries only what its prompt adds after `prefix_tokens` tokens of its parent's prompt and completion; the tree is
`opengyre.trees`, which verifies and places calls by their tokens. Each path that is taken is one sequence. The tokens
that a call sampled are trained in the first path that has them and are context everywhere else, so that a sampled token
has a loss in at most one place.

Invariants: every call is in a sequence, or is counted as refused with a reason, or its tokens as left out by the bound;
a refused call whose tokens are known still serves as context.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opengyre.proto import group
from opengyre.proto.run import Sampling
from opengyre.proto.traj import Call, Media
from opengyre.trees import Builder, Chosen, Figures, Given, Path, Role, Tree, choose, shares, structural
from opengyre.trees.calls import MAX_TOKEN
from opengyre.trees.keys import Rows, cut
from opengyre.trees.weights import normalised

LOGPROB_CEILING = 1e-4
"""A log-prob above this is none; rounding may leave one slightly above 0."""


@dataclass(frozen=True, slots=True)
class Paths:
    """`refused`: reason -> calls that are not trained. `path_tokens`: prompts and completions without sharing;
    `unique_tokens`: with. `left_out`: role -> sampled tokens that the bound left out. `transitions`: class -> calls."""

    sequences: tuple[group.Sequence, ...]
    refused: dict[str, int]
    trained_tokens: int
    path_tokens: int
    unique_tokens: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    transitions: dict[str, int] = field(default_factory=dict)


def fault_of(call: Call, vocabulary: int | None = None) -> str | None:
    """Why this call's tokens cannot be trained, looking at the call alone; None if they can."""
    most = MAX_TOKEN if vocabulary is None else vocabulary - 1
    if any(ids and not 0 <= min(ids) <= max(ids) <= most for ids in (call.prompt_ids, call.sampled_ids)):
        return "token_id"
    return _fault(call)


def _fault(call: Call) -> str | None:
    """`fault_of` without a look at each id, which the tree has anyway."""
    if call.bulk is not None:
        return "blob_missing"
    sampled = len(call.sampled_ids)
    if sampled == 0:
        return "empty_completion"
    if call.prefix_tokens + len(call.prompt_ids) == 0:
        return "empty_prompt"
    if len(call.logprobs) != sampled:
        return "logprobs_length"
    # What is not a number makes the sum none.
    if not (math.isfinite(sum(call.logprobs)) and max(call.logprobs) <= LOGPROB_CEILING):
        return "logprobs_value"
    if not (math.isfinite(call.temperature) and call.temperature > 0):
        return "temperature"
    place = 0
    for span in call.versions:
        if span.start != place or span.end < span.start or span.version < 0:
            return "version_spans"
        place = span.end
    if place != sampled:
        return "version_spans"
    return _misdressed(call) if call.media or call.routes is not None else None


def _misdressed(call: Call) -> str | None:
    """Why what its tokens stand in cannot be."""
    end = call.prefix_tokens + len(call.prompt_ids)
    if any(not call.prefix_tokens <= one.position < end for one in call.media):
        return "media_position"
    if call.routes is not None and call.routes.versions != call.versions:
        return "routes_version"
    return None


def tree_of(calls: Sequence[Call], vocabulary: int | None = None) -> tuple[Tree, dict[str, Call], int]:
    """The tree of the calls of one execution, in log order; each of its calls by id; and how many ids came with two
    contents, which are refused with all that bears them."""
    unique, conflicts = _unique(calls)
    builder = Builder(vocabulary=vocabulary)
    missing: dict[str, str] = {}
    for order, call in enumerate(unique.values()):
        if call.bulk is not None:
            missing[call.call] = "blob_missing"  # With what goes on from it: its tokens are not known.
            continue
        routes = call.routes
        builder.add(
            Given(
                call.call, call.prompt_ids, call.sampled_ids, call.parent, call.prefix_tokens, order,
                _fault(call), call.role, wanted=call.choices > 1 or call.lane is not None, adapter=call.adapter,
                media=tuple((one.position, one.hash) for one in call.media),
                rows=None if routes is None else Rows(routes.blob, routes.start, routes.start + routes.rows),
            )
        )  # fmt: skip
    tree = builder.tree()
    return (dataclasses.replace(tree, lost={**tree.lost, **missing}) if missing else tree), unique, conflicts


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tree of an execution, and which of its paths are trained."""

    tree: Tree
    calls: dict[str, Call]
    roles: dict[str, Role]
    chosen: Chosen
    refused: dict[str, int]
    """Reason -> calls."""
    figures: Figures


def draw(
    calls: Sequence[Call], sampling: Sampling | None = None, seed: int = 0, vocabulary: int | None = None
) -> Drawn:
    """Of the calls of one execution, in log order. `seed` is the execution's; with that of `sampling` it decides what
    is drawn."""
    sampling = sampling or Sampling()
    tree, by_name, conflicts = tree_of(calls, vocabulary)
    roles = structural(tree.nodes)
    chosen = choose(tree.nodes, roles, j_max=sampling.j_max, seed=f"{sampling.seed}-{seed}")
    figures = tree.figures
    refused = Counter(figures.refused)
    if conflicts:
        refused["conflicting_call"] += conflicts
    return Drawn(tree, by_name, roles, chosen, dict(sorted(refused.items())), figures)


def paths(
    calls: Sequence[Call],
    sampling: Sampling | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
    advantages: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Paths:
    """Sequences of the calls of one execution, in log order. A repeated call (same id and content) counts once.

    What is drawn is as `draw` says. What has ids from `vocabulary` on is refused, and so is what is known by its tokens
    only. `advantages`: call -> advantage of its tokens, for calls that have one of their own. `weights`: call -> weight
    of its tokens, as it is; None: as `sampling` says.
    """
    sampling = sampling or Sampling()
    drawn = draw(calls, sampling, seed, vocabulary)
    tree, chosen, own = drawn.tree, drawn.chosen, advantages or {}
    weight = weights or {}
    if weights is None and sampling.alternatives == "leaves":
        weight = _weights(tree, chosen.paths)
    figures = drawn.figures
    return Paths(
        sequences=tuple(_sequence(tree, path, drawn.calls, weight, own) for path in chosen.paths),
        refused=drawn.refused,
        trained_tokens=sum(path.events for path in chosen.paths),
        path_tokens=figures.path_tokens,
        unique_tokens=figures.unique_nodes,
        left_out=chosen.left_out,
        transitions=figures.transitions,
    )


def _unique(calls: Iterable[Call]) -> tuple[dict[str, Call], int]:
    seen: dict[str, Call] = {}
    conflicts: set[str] = set()
    for call in calls:
        before = seen.setdefault(call.call, call)
        if before is not call and before != call:
            conflicts.add(call.call)
    return {name: call for name, call in seen.items() if name not in conflicts}, len(conflicts)


def _weights(tree: Tree, taken: Sequence[Path]) -> dict[str, float]:
    share = shares(tree.nodes)
    nodes = [node for path in taken for node in path.calls]
    scaled = normalised([share[node.call] for node in nodes], [node.events for node in nodes])
    return {node.call: weight for node, weight in zip(nodes, scaled, strict=True)}


def _sequence(
    tree: Tree, path: Path, calls: Mapping[str, Call], weight: Mapping[str, float], advantages: Mapping[str, float]
) -> group.Sequence:
    """Tokens from the root to the last that is trained on the path: what follows has no part in the loss."""
    spans = []
    for node in path.calls:
        call = calls[node.call]
        versions = tuple(span.version for span in call.versions for _ in range(span.start, span.end))
        spans.append(
            group.Span(
                start=node.start.depth, end=node.length, logprobs=call.logprobs, versions=versions,
                temperature=call.temperature, weight=weight.get(node.call, 1.0),
                advantage=advantages.get(node.call),
            )
        )  # fmt: skip
    last = path.calls[-1]
    return group.Sequence(
        tokens=tuple(tree.tokens(last).tolist()),
        spans=tuple(spans),
        role=path.role,
        adapter=last.given.adapter,
        media=tuple(Media(position=place, hash=name) for place, name in tree.media(last)),
        routes=tuple(
            group.RouteRows(start=one.start, end=one.end, blob=one.blob, first=one.first)
            for one in cut(last.rows, 0, last.length)
        ),
    )
