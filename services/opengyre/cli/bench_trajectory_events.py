"""Logs of executions, as the rollout service writes them, from the calls of `bench_trajectory_load`. Pure."""

from typing import NamedTuple

import msgspec
import numpy as np

from opengyre.cli.bench_trajectory_load import Shape, execution
from opengyre.cli.bench_trajectory_tree import shortened
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Started, TrajEvent, Verified, VersionSpan

RUN = "bench"


class Ids(NamedTuple):
    run: str
    group: str
    execution: str


def calls_of(shape: Shape, seed: int, ids: Ids) -> list[Call]:
    """The calls of an execution."""
    rng = np.random.default_rng(seed)
    found: list[Call] = []
    for number, given in enumerate(shortened(list(execution(shape, seed)))):
        sampled = tuple(map(int, given.sampled))
        found.append(
            Call(
                run=ids.run, group=ids.group, execution=ids.execution, index=number + 1, attempt=0,
                call=given.call, turn=number, request_digest="0" * 64,
                parent=given.parent, prefix_tokens=given.prefix or 0, prompt_ids=tuple(map(int, given.prompt)),
                sampled_ids=sampled, logprobs=tuple(map(float, np.round(-rng.exponential(0.5, len(sampled)), 6))),
                versions=(VersionSpan(version=0, start=0, end=len(sampled)),), temperature=1.0, finish_reason="stop",
                text="", hosts=("h0",),
            )
        )  # fmt: skip
    return found


def group(number: int, size: int, shape: Shape) -> list[list[TrajEvent]]:
    """The logs of a group's executions, one list each; half of them score 1, half 0."""
    name = f"{RUN}-g{number:06d}"
    members = tuple(f"{name}-e{member:02d}" for member in range(size))
    task = TaskSpec(task=f"t{number}", instruction="go on", checks=(Check(name="a", command="true", weight=1.0),))
    logs: list[list[TrajEvent]] = []
    for member, execution_id in enumerate(members):
        dispatch = EpisodeDispatch(
            run=RUN, group=name, execution=execution_id, members=members, version=0, seed=member, task=task,
            harness=Harness(), min_members=2,
        )  # fmt: skip
        calls = calls_of(shape, number * size + member, Ids(RUN, name, execution_id))
        place = len(calls) + 1
        sampled = sum(len(call.sampled_ids) for call in calls)
        at = {"run": RUN, "group": name, "execution": execution_id, "attempt": 0}
        start = {**at, "index": 0, "dispatch": dispatch, "replica": "bench", "vocabulary": shape.vocabulary}
        verdict = {**at, "index": place, "parts": (Part(name="a", weight=1.0, value=float(member % 2)),)}
        end = {**at, "index": place + 1, "reason": "done", "turns": len(calls), "sampled_tokens": sampled}
        logs.append(
            [
                msgspec.convert(start, Started),
                *calls,
                msgspec.convert(verdict, Verified),
                msgspec.convert({**end, "duration_s": 1.0, "members": members}, Ended),
            ]
        )
    return logs
