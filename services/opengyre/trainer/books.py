"""What an update amounts to: checks of what came, sums of statistics, the record of a commit. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from opengyre.learn.gradient import MAGNITUDE, InvalidSequenceError, check
from opengyre.proto.group import GroupReady, Member
from opengyre.proto.ids import group_of
from opengyre.proto.run import RunSpec
from opengyre.proto.task import GroupConsumed
from opengyre.proto.update import Committed, UpdateStats
from opengyre.trainer.frontier import Frontier
from opengyre.trainer.learner import Stepped, finite
from opengyre.trainer.parity import alarm
from opengyre.trainer.store import Record
from opengyre.trainer.update import Update
from opengyre.trees import weights
from opengyre.trees.weights import commit_scale, local_weight


class NegativeStalenessError(Exception):
    """A group that was admitted at a version that this trainer has not made: its state is not of this run. Fatal."""


@dataclass(frozen=True, slots=True)
class Held:
    """A message of a group. `ready` as it came, with its members as a blob or not."""

    ready: GroupReady
    members: tuple[Member, ...]

    @property
    def key(self) -> str:
        """Of the message; it was delivered twice if it comes again."""
        return self.ready.event_id()

    @property
    def executions(self) -> tuple[str, ...]:
        """What it accounts for."""
        return self.ready.executions or tuple(member.execution for member in self.members)

    @property
    def idle(self) -> frozenset[str]:
        """Executions without a score: they take places and are no work."""
        return frozenset(self.executions) - {member.execution for member in self.members}

    @property
    def group_size(self) -> int:
        return self.ready.group_size or len(self.executions)


@dataclass(frozen=True, slots=True)
class Part:
    """What an update holds of one message."""

    held: Held
    executions: tuple[str, ...]
    members: tuple[Member, ...]


def parts_of(update: Update, held: Mapping[str, Held]) -> list[Part]:
    """In order of arrival."""
    by_message: dict[str, list[str]] = {}
    for unit in update.units:
        by_message.setdefault(update.source[unit], []).append(unit)
    return [
        Part(held[key], tuple(units), tuple(m for m in held[key].members if m.execution in units))
        for key, units in by_message.items()
    ]


def groups_of(executions: Iterable[str]) -> tuple[str, ...]:
    """Their groups, each once, in order."""
    return tuple(dict.fromkeys(map(group_of, executions)))


def fault_of(held: Held, *, vocabulary: int, context: int, version: int) -> str | None:
    """Why a message cannot be trained, in a sentence; None if it can. `version`: the trainer's."""
    members = held.members
    names = [member.execution for member in members]
    if not held.executions:
        return "it has no members"
    if len(set(names)) != len(names) or len(set(held.executions)) != len(held.executions):
        return "an execution is in it twice"
    strange = next((name for name in (*names, *held.executions) if group_of(name) != held.ready.group), None)
    if strange is not None or not set(names) <= set(held.executions):
        return f"{strange or 'a member'} is not one of its executions"
    faults = (_member_fault(member, vocabulary, context, version) for member in members)
    return next((fault for fault in faults if fault is not None), None)


def _member_fault(member: Member, vocabulary: int, context: int, version: int) -> str | None:
    name = member.execution
    if not 0 <= member.score <= 1:
        return f"{name}: score is {member.score}; allowed are values from 0 to 1"
    if not abs(member.advantage) <= MAGNITUDE:  # So is not-a-number refused.
        return f"{name}: advantage is {member.advantage}; allowed are values from {-MAGNITUDE:.0f} to {MAGNITUDE:.0f}"
    try:
        for sequence in member.sequences:
            check(sequence)
    except InvalidSequenceError as error:
        return f"{name}: {error}"
    tokens = sum(span.end - span.start for sequence in member.sequences for span in sequence.spans)
    if tokens != member.trained_tokens:
        return f"{name}: trained_tokens is {member.trained_tokens}; its spans have {tokens}"
    newest = max((v for sequence in member.sequences for span in sequence.spans for v in span.versions), default=0)
    if newest > version:
        return f"{name}: versions has {newest}; allowed are values from 0 to {version}, the trainer's"
    for sequence in member.sequences:
        if len(sequence.tokens) > context:
            return f"{name}: a sequence has {len(sequence.tokens)} tokens; the model takes {context}"
        for token in (min(sequence.tokens, default=0), max(sequence.tokens, default=0)):
            if not 0 <= token < vocabulary:
                return f"{name}: token id {token} is outside the vocabulary of {vocabulary}"
    return None


def staleness(ready: GroupReady, version: int) -> int:
    """`d = v_t - v_d`; raises `NegativeStalenessError` (law 4)."""
    if ready.version > version:
        raise NegativeStalenessError(
            f"group {ready.group} was admitted at version {ready.version}, but the trainer's checkpoints end at "
            f"{version}: they are not of this run"
        )
    return version - ready.version


def nominal_weight(spec: RunSpec) -> float:
    """Of each execution, before it is known how many have a score: 1 / (B * G)."""
    return 1.0 / (spec.dispatch.batch_groups * spec.dispatch.group_size)


def token_weights(spec: RunSpec, held: Held, units: Iterable[str]) -> dict[str, float]:
    """Of each trained token of these executions (those that have a score), up to `scale`."""
    average, constant = spec.optimization.average, spec.optimization.constant_tokens or 0
    whole = _share(held)
    tokens = sum(member.weighed_tokens for member in held.members)
    wanted = set(units)
    return {
        member.execution: nominal_weight(spec)
        * local_weight(average, member.weighed_tokens, message_tokens=tokens, share=whole, constant=constant)
        for member in held.members
        if member.execution in wanted
    }


def scale(spec: RunSpec, parts: Sequence[Part]) -> float:
    """What turns `token_weights` into weights of the update that these parts make up."""
    found = [
        weights.Part(
            executions=len(part.members),
            tokens=sum(member.weighed_tokens for member in part.members),
            of_executions=len(part.held.members),
            of_tokens=sum(member.weighed_tokens for member in part.held.members),
            share=_share(part.held),
        )
        for part in parts
    ]
    return commit_scale(spec.optimization.average, found) / nominal_weight(spec)


def _share(held: Held) -> float:
    """How much of its group a message is."""
    return len(held.executions) / held.group_size


def total_stats(update: Update, parts: Sequence[Part], factor: float) -> UpdateStats:
    """Sums over the contributions; what we know of the groups ourselves is not taken from the cells."""
    total = sum((contribution.stats for contribution in update.contributions.values()), UpdateStats())
    by_group: dict[str, list[Member]] = {}
    for part in parts:
        by_group.setdefault(part.held.ready.group, []).extend(part.members)
    members = [member for of_group in by_group.values() for member in of_group]
    figures = {name: finite(v) for name, v in msgspec.structs.asdict(total).items() if isinstance(v, float)}
    return msgspec.structs.replace(
        total,
        **figures
        | {
            "executions": len(members),
            "path_tokens": sum(member.path_tokens for member in members),
            "score_sum": sum(member.score for member in members),
            "zero_variance_groups": sum(
                not any(member.judged for member in of_group) for of_group in by_group.values() if of_group
            ),
            "loss": finite(total.loss * factor),
        },
    )


def refusal(update: Update) -> str | None:
    """Why the sum of the contributions is not to be stepped by: cells left out groups that were not finite."""
    return "non_finite_loss" if _broken(update) else None


def skip_reason(stepped: Stepped, broken: Sequence[str], update: Update) -> str | None:
    """Why the optimizer did not step, naming the groups that were not finite, or those that they were summed with.

    `broken`: contributions whose sums are not finite.
    """
    if stepped.skipped is None:
        return None
    if known := _broken(update):
        return f"{stepped.skipped}; in {', '.join(known)}"
    groups = sorted({group_of(unit) for name in broken for unit in update.contributions[name].units})
    return f"{stepped.skipped}; in the contributions of {', '.join(groups)}" if groups else stepped.skipped


def _broken(update: Update) -> list[str]:
    return sorted({group for contribution in update.contributions.values() for group in contribution.stats.broken})


def publishes(spec: RunSpec, before: Record) -> bool:
    """Whether the next version ends a burst. Counted from the last publication, so that a change of mu skips none."""
    version = before.version + 1
    return version - before.published >= spec.dispatch.mu or ends(spec, version)


def ends(spec: RunSpec, version: int) -> bool:
    """Whether the run is finished with `version`."""
    return spec.updates is not None and version >= spec.updates


def next_record(
    before: Record,
    spec: RunSpec,
    update: Update,
    held: Mapping[str, Held],
    stepped: Stepped,
    broken: Sequence[str],
    *,
    dropped: Mapping[str, int],
    blobs: Iterable[str] = (),
    opened_s: float,
) -> Record:
    """The record of the commit of `update`. `held`: message -> what it brought; `dropped`: executions that left
    training since the record before, each with the size of its group; `blobs`: what nobody needs after it."""
    version = update.number
    published = publishes(spec, before)
    parts = parts_of(update, held)
    executions = tuple(member.execution for part in parts for member in part.members)
    skipped = skip_reason(stepped, broken, update)
    stats = total_stats(update, parts, scale(spec, parts))
    ready = {part.held.ready.group: part.held.ready for part in parts}
    committed = Committed(
        run=spec.run,
        update=update.number,
        attempt=update.attempt,
        version=version,
        published=published,
        groups=tuple(ready),
        executions=executions,
        staleness=tuple(staleness(of_group, version - 1) for of_group in ready.values()),
        unscored=tuple(unit for unit in update.units if unit in update.idle),
        score=stats.score_sum / max(1, len(executions)),
        gradient_norm=finite(stepped.gradient_norm),
        learning_rate=stepped.learning_rate,
        skipped=skipped,
        alarm=alarm(spec.optimization, stats),
        stats=stats,
        opened_s=opened_s,
    )
    lost = skipped is not None and bool(executions)
    consumed = tuple(
        GroupConsumed(
            run=spec.run,
            task=of_group.task,
            group=name,
            outcome="dropped" if lost else "trained",
            reason="non_finite_gradient" if lost else None,
            version=version - 1,
            executions=tuple(unit for part in parts if part.held.ready.group == name for unit in part.executions),
        )
        for name, of_group in ready.items()
    )
    frontier = Frontier(before.frontier, before.partial)
    frontier.add(dropped, {group_of(name): size for name, size in dropped.items()})
    frontier.add(update.units, {part.held.ready.group: part.held.group_size for part in parts})
    gradients = (contribution.gradient for contribution in update.contributions.values())
    return msgspec.structs.replace(
        before,
        version=version,
        published=version if published else before.published,
        frontier=frontier.whole,
        partial=frontier.partial,
        committed=committed,
        consumed=consumed,
        finished=ends(spec, version),
        blobs=tuple(sorted({*gradients, *blobs})),
    )
