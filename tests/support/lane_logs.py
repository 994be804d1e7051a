"""Logs of executions that went on as lanes, as the rollout service writes them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from opengyre.learn.advantage import Kind
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Branching, Harness
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import (
    Call,
    Ended,
    Forked,
    Part,
    SandboxOpened,
    Started,
    ToolResult,
    TrajEvent,
    Verified,
    VersionSpan,
)

GROUP = "r-g000001"
TASK = TaskSpec(task="t", instruction="x", checks=(Check(name="a", command="true", weight=1),))
TRUNK, LANE = 10, 20
"""First ids of what the trunk and a lane may sample."""


def names(count: int) -> tuple[str, ...]:
    return tuple(f"{GROUP}-e{number:02d}" for number in range(count))


def log(
    member: str, members: tuple[str, ...], trunk: int, lanes: Sequence[Sequence[int]], scores: Sequence[float | None],
    kind: Kind = "loo", *, tools: bool = False, **changes: Any,
) -> list[TrajEvent]:  # fmt: skip
    """An execution whose trunk says one token, and each of whose lanes says some, one a call. `tools`: each call has a
    command, named by its lane and turn."""
    events: list[TrajEvent] = []

    def ids() -> dict[str, Any]:
        return {"run": "r", "group": GROUP, "execution": member, "index": len(events), "attempt": 0}

    said: list[str] = []

    def call(
        token: int, prompt: tuple[int, ...], before: tuple[str, int] | None, lane: int | None, turn: int
    ) -> tuple[str, int]:
        parent, length = before or (None, 0)
        name = f"c{len(events):04d}"
        events.append(
            Call(
                **ids(), call=name, turn=len(said), request_digest=name, parent=parent, prefix_tokens=length,
                prompt_ids=prompt, sampled_ids=(token,), logprobs=(-0.5,), temperature=1.0, finish_reason="stop",
                versions=(VersionSpan(version=2, start=0, end=1),), text="x", hosts=("h",), lane=lane,
            )
        )  # fmt: skip
        said.append(name)
        if tools:
            events.append(
                ToolResult(
                    **ids(), turn=turn, exec_id=f"t{turn}", command=f"{lane}/{turn}", exit_code=0, output="",
                    output_bytes=0, timed_out=False, lane=lane,
                )
            )  # fmt: skip
        return name, length + len(prompt) + 1

    dispatch = EpisodeDispatch(
        run="r", group=GROUP, execution=member, members=members, version=2, seed=1, task=TASK, min_members=1,
        harness=Harness(branching=Branching(turn=1, copies=len(lanes))), advantage=kind, **changes,
    )  # fmt: skip
    events.append(Started(**ids(), dispatch=dispatch, replica="a"))
    events.append(SandboxOpened(**ids(), sandbox=member, node="n", isolated=True))
    root = call(TRUNK + trunk, (1,), None, None, 0)
    events.append(Forked(**ids(), turn=1, copies=len(lanes), snapshot="s"))
    ends = [root] * len(lanes)
    for turn in range(max(map(len, lanes))):  # side by side, as they are lived
        for number, lane in enumerate(lanes):
            if turn < len(lane):
                ends[number] = call(LANE + lane[turn], (2,), ends[number], number, 1 + turn)
    for number, score in enumerate(scores):
        parts = () if score is None else (Part(name="a", weight=1, value=score),)
        fault = "it was killed" if score is None else None
        events.append(Verified(**ids(), parts=parts, infra_error=fault, reason="done", lane=number))
    events.append(Ended(**ids(), reason="done", turns=3, sampled_tokens=3, duration_s=1.0, members=members))
    return events


def plain(member: str, members: tuple[str, ...], trunk: int, score: float) -> list[TrajEvent]:
    """An execution that ended before its fork."""
    whole = log(member, members, trunk, [(), ()], [None, None])
    at: dict[str, Any] = {"run": "r", "group": GROUP, "execution": member, "attempt": 0}
    found = [event for event in whole if not isinstance(event, Forked | Verified | Ended)]
    found.append(Verified(**at, index=len(found), parts=(Part(name="a", weight=1, value=score),), reason="done"))
    end = whole[-1]
    assert isinstance(end, Ended)
    return [*found, msgspec.structs.replace(end, index=len(found))]
