"""What became of one execution: its tree, its score, what is trained of it and why the rest is not. Pure.

Made from the log of the whole group, by what makes the group itself, so it says what was trained, not what would be
trained now. A log that is not whole yet is told as far as it goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.proto.explain import (
    ExplainedCall,
    ExplainedLane,
    ExplainedPath,
    ExplainedProgress,
    ExplainReport,
    Outcome,
)
from opengyre.proto.group import Member, Span
from opengyre.proto.traj import Call, Ended, Forked, Progressed, Started, TrajEvent
from opengyre.trajectory.assemble import Assembled, LogEvent, NotWholeError, assemble
from opengyre.trajectory.lanes import UNSCORED, Lanes, lanes_of, why_unscored
from opengyre.trajectory.progress import measured, potentials
from opengyre.trajectory.tree import draw
from opengyre.trees import Node, Path

NO_ADVANTAGE = "no advantage"
"""Why nothing is trained of an execution whose tokens all have an advantage of 0, as in a group without variance."""
TEXT = 160
"""Characters of a completion that are shown."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What is said of calls."""

    places: dict[str, int]
    """Call -> its path."""
    spans: dict[str, Span]
    """Call -> what the group says of it."""
    potentials: dict[str, float | None]
    advantage: float | None
    """The execution's."""
    nothing: str | None
    """Why nothing of the execution is trained."""


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
    log = sorted(own, key=lambda event: (event.index, event.attempt))
    ordered = [event for event in log if isinstance(event, Call)]
    sampling = started.dispatch.sampling
    lanes = lanes_of(log)
    kept = ordered if lanes is None or member is None else list(lanes.kept(ordered))
    names = {call.call for call in kept}
    unscored = [call for call in ordered if call.call not in names]
    drawn = draw(kept, sampling, started.dispatch.seed, started.vocabulary)
    tree, chosen = drawn.tree, drawn.chosen
    judged = member is not None and member.judged
    paths = tuple(_path(path, judged=judged) for path in chosen.paths) if member is not None else ()
    places = {node.call: place for place, path in enumerate(chosen.paths) for node in path.calls}
    nothing = None if judged else NO_ADVANTAGE
    if member is None:
        nothing = _why_nothing(part, execution, ended=ended is not None)
    spans = _spans(chosen.paths, member)
    told = _Told(places, spans, potentials(log), member.advantage if member is not None else None, nothing)
    figures = drawn.figures
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
        calls=figures.calls + drawn.refused.get("conflicting_call", 0) + len(unscored),
        events=figures.events + sum(len(call.sampled_ids) for call in unscored),
        path_tokens=figures.path_tokens,
        unique_nodes=figures.unique_nodes,
        leaves=figures.leaves,
        dedup_ratio=round(figures.dedup_ratio, 4),
        trained_tokens=sum(path.trained_tokens for path in paths),
        masked_tokens=sum(path.masked_tokens for path in paths),
        left_out=chosen.left_out if member is not None else {},
        refused=drawn.refused | ({UNSCORED: len(unscored)} if unscored else {}),
        transitions=figures.transitions,
        diagnoses=figures.diagnoses,
        j_max=sampling.j_max,
        paths=paths,
        per_call=(
            *(_placed(told, node, drawn.calls[node.call], drawn.roles[node.call]) for node in tree.nodes),
            *(_lost(drawn.calls[name], reason) for name, reason in tree.lost.items() if name in drawn.calls),
            *(_lost(call, UNSCORED) for call in unscored),
        ),
        credit=dispatch.scoring.credit,
        progress=tuple(_progress(event) for event in log if isinstance(event, Progressed)),
        forked_at=next((event.turn for event in log if isinstance(event, Forked)), None),
        lanes=_lanes(lanes, ordered, told) if lanes is not None else (),
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


def _path(path: Path, *, judged: bool) -> ExplainedPath:
    on_the_way, node = 0, path.calls[-1]
    last: Node | None = node
    while last is not None:
        on_the_way += last.events
        last = last.parent
    return ExplainedPath(
        role=path.role,
        calls=tuple(one.call for one in path.calls),
        tokens=node.length,
        trained_tokens=path.events if judged else 0,
        masked_tokens=on_the_way - path.events,
    )


def _spans(paths: Sequence[Path], member: Member | None) -> dict[str, Span]:
    found: dict[str, Span] = {}
    for path, sequence in zip(paths, member.sequences if member is not None else (), strict=False):
        found |= {node.call: span for node, span in zip(path.calls, sequence.spans, strict=True)}
    return found


def _progress(event: Progressed) -> ExplainedProgress:
    return ExplainedProgress(
        turn=event.turn, call=event.call, potential=measured(event), infra_error=event.infra_error
    )  # fmt: skip


def _lanes(lanes: Lanes, calls: Sequence[Call], told: _Told) -> tuple[ExplainedLane, ...]:
    scores = lanes.scores
    found = []
    for lane, verdict in lanes.verdicts.items():
        own = [call for call in calls if call.lane == lane]
        span = next((told.spans[call.call] for call in own if call.call in told.spans), None)
        found.append(
            ExplainedLane(
                lane=lane,
                calls=len(own),
                tokens=sum(len(call.sampled_ids) for call in own),
                score=scores.get(lane),
                advantage=span.advantage if span is not None else None,
                weight=span.weight if span is not None else None,
                end_reason=verdict.reason if verdict is not None else None,
                unscored=why_unscored(verdict),
            )
        )
    return tuple(found)


def _placed(told: _Told, node: Node, call: Call, role: str) -> ExplainedCall:
    outcome: Outcome = "left_out"
    reason: str | None = "the bound on paths did not reach it"
    if node.refused is not None:
        outcome, reason = "refused", node.refused
    elif told.nothing is not None and (told.nothing != NO_ADVANTAGE or node.call in told.places):
        outcome, reason = "not_trained", told.nothing
    elif node.call in told.places:
        outcome, reason = "trained", None
    span = told.spans.get(node.call) if outcome == "trained" else None
    own = span.advantage if span is not None else None
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
        path=told.places.get(node.call) if outcome == "trained" else None,
        weight=span.weight if span is not None else None,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        text=call.text[:TEXT],
        potential=told.potentials.get(node.call),
        advantage=None if span is None else told.advantage if own is None else own,
        lane=call.lane,
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
        lane=call.lane,
    )
