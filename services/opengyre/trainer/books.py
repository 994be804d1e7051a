"""What an update amounts to: checks of a group, sums of statistics, the record of a commit. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from opengyre.learn.gradient import InvalidSequenceError, check
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.run import RunSpec
from opengyre.proto.task import GroupConsumed
from opengyre.proto.update import Committed, UpdateStats
from opengyre.trainer.learner import Stepped, finite
from opengyre.trainer.store import Record
from opengyre.trainer.update import Update


class NegativeStalenessError(Exception):
    """A group that was admitted at a version that this trainer has not made: its state is not of this run. Fatal."""


@dataclass(frozen=True, slots=True)
class Held:
    """A group that is in the update. `ready` as it came, with its members as a blob or not."""

    ready: GroupReady
    members: tuple[Member, ...]


def fault_of(members: Sequence[Member], *, vocabulary: int, context: int) -> str | None:
    """Why a group cannot be trained, in a sentence; None if it can."""
    names = [member.execution for member in members]
    if not names:
        return "it has no members"
    if len(set(names)) != len(names):
        return "an execution is in it twice"
    for member in members:
        try:
            for sequence in member.sequences:
                check(sequence)
        except InvalidSequenceError as error:
            return f"{member.execution}: {error}"
        tokens = sum(span.end - span.start for sequence in member.sequences for span in sequence.spans)
        if tokens != member.trained_tokens:
            return f"{member.execution}: trained_tokens is {member.trained_tokens}; its spans have {tokens}"
        for sequence in member.sequences:
            if len(sequence.tokens) > context:
                return f"{member.execution}: a sequence has {len(sequence.tokens)} tokens; the model takes {context}"
            if not 0 <= min(sequence.tokens, default=0) <= max(sequence.tokens, default=0) < vocabulary:
                return f"{member.execution}: a token id is outside the vocabulary of {vocabulary}"
    return None


def staleness(ready: GroupReady, version: int) -> int:
    """`d = v_t - v_d`; raises `NegativeStalenessError` (law 4)."""
    if ready.version > version:
        raise NegativeStalenessError(
            f"group {ready.group} was admitted at version {ready.version}, but the trainer's checkpoints end at "
            f"{version}: they are not of this run"
        )
    return version - ready.version


def executions_of(groups: Mapping[str, Held]) -> tuple[str, ...]:
    """Every execution of the groups, in order."""
    return tuple(member.execution for held in groups.values() for member in held.members)


def nominal_weight(spec: RunSpec) -> float:
    """Of each execution, before it is known how many have a score: 1 / (B * G)."""
    return 1.0 / (spec.dispatch.batch_groups * spec.dispatch.group_size)


def scale(spec: RunSpec, executions: int) -> float:
    """What turns nominal weights into 1 / (executions of the update)."""
    return 1.0 / (nominal_weight(spec) * executions)


def total_stats(update: Update, groups: Mapping[str, Held], factor: float) -> UpdateStats:
    """Sums over the contributions; what we know of the groups ourselves is not taken from the cells."""
    sums = {
        name: sum(getattr(contribution.stats, name) for contribution in update.contributions.values())
        for name in UpdateStats.__struct_fields__
    }
    members = [held.members for held in groups.values()]
    sums |= {
        "executions": sum(len(of_group) for of_group in members),
        "path_tokens": sum(member.path_tokens for of_group in members for member in of_group),
        "score_sum": sum(member.score for of_group in members for member in of_group),
        "zero_variance_groups": sum(all(member.advantage == 0 for member in of_group) for of_group in members),
        "loss": sums["loss"] * factor,
    }
    return msgspec.convert({name: finite(value) for name, value in sums.items()}, UpdateStats)


def skip_reason(stepped: Stepped, broken: Sequence[str], update: Update) -> str | None:
    """Why the optimizer did not step, naming the groups whose contributions were not finite."""
    if stepped.skipped is None:
        return None
    groups = sorted(group for name in broken for group in update.contributions[name].groups)
    return f"{stepped.skipped}; in the contributions of {', '.join(groups)}" if groups else stepped.skipped


def next_record(
    before: Record,
    spec: RunSpec,
    update: Update,
    groups: Mapping[str, Held],
    stepped: Stepped,
    broken: Sequence[str],
    *,
    dropped: Sequence[str],
    opened_s: float,
) -> Record:
    """The record of the commit of `update`. `dropped`: groups that left training since the record before."""
    version = update.number
    finished = spec.updates is not None and version >= spec.updates
    published = finished or version % spec.dispatch.mu == 0
    ordered = {name: groups[name] for name in update.groups}
    executions = executions_of(ordered)
    skipped = skip_reason(stepped, broken, update)
    stats = total_stats(update, ordered, scale(spec, len(executions)))
    committed = Committed(
        run=spec.run,
        update=update.number,
        attempt=update.attempt,
        version=version,
        published=published,
        groups=update.groups,
        executions=executions,
        staleness=tuple(staleness(held.ready, version - 1) for held in ordered.values()),
        score=stats.score_sum / len(executions),
        gradient_norm=finite(stepped.gradient_norm),
        skipped=skipped,
        stats=stats,
        opened_s=opened_s,
    )
    consumed = tuple(
        GroupConsumed(
            run=spec.run,
            task=held.ready.task,
            group=name,
            outcome="trained" if skipped is None else "dropped",
            reason=None if skipped is None else "non_finite_gradient",
            version=version - 1,
        )
        for name, held in ordered.items()
    )
    return msgspec.structs.replace(
        before,
        version=version,
        published=version if published else before.published,
        frontier=tuple(sorted({*before.frontier, *update.groups, *dropped})),
        committed=committed,
        consumed=consumed,
        finished=finished,
        blobs=tuple(
            sorted(
                {
                    *(contribution.gradient for contribution in update.contributions.values()),
                    *(held.ready.blob for held in groups.values() if held.ready.blob is not None),
                }
            )
        ),
    )
