"""What became of one execution: its tree, its score, what is trained of it and why the rest is not. Pure.

Made from the log of the whole group, by what makes the group itself, so it says what was trained, not what would be
trained now. A log that is not whole yet is told as far as it goes.
"""

from collections import Counter
from collections.abc import Sequence

from opengyre.proto.explain import ExplainedCall, ExplainedPath, ExplainReport, Outcome
from opengyre.proto.group import Member
from opengyre.proto.traj import Call, Ended, Started, TrajEvent
from opengyre.trajectory.assemble import Assembled, LogEvent, NotWholeError, assemble
from opengyre.trajectory.tree import tree_of
from opengyre.trees import Node, Path, choose, structural

TEXT = 160
"""Characters of a completion that are shown."""


class UnknownExecutionError(LookupError):
    """The log has nothing of the execution."""


def explain(execution: str, events: Sequence[LogEvent]) -> ExplainReport:
    """The execution, from its group's log in stream order. Raises `UnknownExecutionError`."""
    own = [event for event in events if isinstance(event, TrajEvent) and event.execution == execution]
    started = next((event for event in own if isinstance(event, Started)), None)
    if started is None:
        raise UnknownExecutionError(f"the stream TRAJ has no start of execution {execution}")
    ended = next((event for event in own if isinstance(event, Ended)), None)
    part = _part(execution, events)
    member = _member(execution, part)
    ordered = sorted((event for event in own if isinstance(event, Call)), key=lambda call: (call.index, call.attempt))
    tree, by_name, conflicts = tree_of(ordered, started.vocabulary)
    sampling = started.dispatch.sampling
    roles = structural(tree.nodes)
    # The same draw that made the group: `paths` of `trajectory.tree`.
    seed = f"{sampling.seed}-{started.dispatch.seed}"
    chosen = choose(tree.nodes, roles, j_max=sampling.j_max, seed=seed)
    paths = tuple(_path(path) for path in chosen.paths) if member is not None else ()
    places = {node.call: place for place, path in enumerate(chosen.paths) for node in path.calls}
    nothing = _why_nothing(part, execution, ended=ended is not None) if member is None else None
    weights = _weights(chosen.paths, member)
    figures = tree.figures
    refused = Counter(figures.refused)
    if conflicts:
        refused["conflicting_call"] += conflicts
    dispatch, score = started.dispatch, part.scored if part is not None else None
    ready = part.ready if part is not None else None
    return ExplainReport(
        execution=execution,
        group=started.group,
        run=started.run,
        task=dispatch.task.task,
        purpose=dispatch.task.purpose,
        state="ended" if ended is not None else "live",
        end_reason=ended.reason if ended is not None else None,
        group_state=score.outcome if score is not None else "open",
        group_reason=score.reason if score is not None else None,
        score=score.scores.get(execution) if score is not None else None,
        unscored=score.unscored.get(execution) if score is not None else None,
        advantage=member.advantage if member is not None else None,
        baseline=ready.baseline if ready is not None else None,
        scale=ready.scale if ready is not None else None,
        late=score.late if score is not None else False,
        calls=len(tree.nodes) + len(tree.lost) + conflicts,
        events=figures.events,
        path_tokens=figures.path_tokens,
        unique_nodes=figures.unique_nodes,
        leaves=figures.leaves,
        dedup_ratio=round(figures.dedup_ratio, 4),
        trained_tokens=sum(path.trained_tokens for path in paths),
        masked_tokens=sum(path.masked_tokens for path in paths),
        left_out=chosen.left_out if member is not None else {},
        refused=dict(sorted(refused.items())),
        transitions=figures.transitions,
        diagnoses=figures.diagnoses,
        j_max=sampling.j_max,
        paths=paths,
        per_call=(
            *(_placed(node, by_name[node.call], roles[node.call], places, weights, nothing) for node in tree.nodes),
            *(_lost(by_name[name], reason) for name, reason in tree.lost.items() if name in by_name),
        ),
    )


def _part(execution: str, events: Sequence[LogEvent]) -> Assembled | None:
    """What was made of the group that accounts for the execution; None while nothing was."""
    try:
        parts = assemble(events)
    except NotWholeError:
        return None
    return next((part for part in parts if execution in part.scored.executions), None)


def _member(execution: str, part: Assembled | None) -> Member | None:
    members = part.ready.members if part is not None and part.ready is not None else ()
    return next((member for member in members if member.execution == execution), None)


def _why_nothing(part: Assembled | None, execution: str, *, ended: bool) -> str:
    if part is None:
        return "the group has not closed" if ended else "the execution is live"
    if part.scored.outcome == "evaluated":
        return "the task is for evaluation"
    unscored = part.scored.unscored.get(execution)
    if unscored is not None:
        return f"the execution has no score: {unscored}"
    return f"the group was dropped: {part.scored.reason}"


def _path(path: Path) -> ExplainedPath:
    on_the_way, node = 0, path.calls[-1]
    last: Node | None = node
    while last is not None:
        on_the_way += last.events
        last = last.parent
    return ExplainedPath(
        role=path.role,
        calls=tuple(one.call for one in path.calls),
        tokens=node.length,
        trained_tokens=path.events,
        masked_tokens=on_the_way - path.events,
    )


def _weights(paths: Sequence[Path], member: Member | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for path, sequence in zip(paths, member.sequences if member is not None else (), strict=False):
        found |= {node.call: span.weight for node, span in zip(path.calls, sequence.spans, strict=True)}
    return found


def _placed(
    node: Node, call: Call, role: str, places: dict[str, int], weights: dict[str, float], nothing: str | None
) -> ExplainedCall:
    outcome: Outcome = "left_out"
    reason: str | None = "the bound on paths did not reach it"
    if node.refused is not None:
        outcome, reason = "refused", node.refused
    elif nothing is not None:
        outcome, reason = "not_trained", nothing
    elif node.call in places:
        outcome, reason = "trained", None
    versions = [span.version for span in call.versions]
    return ExplainedCall(
        call=node.call,
        turn=call.turn,
        role=role,
        transition=node.kind,
        related=node.related.call if node.related is not None else None,
        offset=node.offset,
        diagnosis=node.diagnosis,
        prompt_tokens=node.start.depth,
        sampled_tokens=node.events,
        outcome=outcome,
        reason=reason,
        path=places.get(node.call) if outcome == "trained" else None,
        weight=weights.get(node.call) if outcome == "trained" else None,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        text=call.text[:TEXT],
    )


def _lost(call: Call, reason: str) -> ExplainedCall:
    """A call that has no place in the tree."""
    return ExplainedCall(
        call=call.call,
        turn=call.turn,
        role=call.role or "main",
        transition="root",
        related=call.parent,
        offset=0,
        diagnosis=None,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.sampled_ids),
        outcome="refused",
        reason=reason,
        text=call.text[:TEXT],
    )
