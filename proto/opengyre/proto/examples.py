"""One example of every event: for the AsyncAPI document, and the first golden payload of a new type."""

from typing import Any

from opengyre.proto.base import Event
from opengyre.proto.decision import CellView, Decision, PolicyInput, RoleChange
from opengyre.proto.dlq import DeadLetter
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.host import DesiredRole, HostCommand, HostState, HostStateChanged
from opengyre.proto.run import Dispatch, Elastic, Harness
from opengyre.proto.task import Check, GroupConsumed, GroupOverdue, GroupScored, TaskAdmitted, TaskSpec, TaskSubmitted
from opengyre.proto.traj import (
    Call,
    Ended,
    Forked,
    Overdue,
    Part,
    Progressed,
    Resumed,
    SandboxOpened,
    Started,
    Stepped,
    Suspended,
    TakenOver,
    ToolResult,
    Verified,
    VersionSpan,
)
from opengyre.proto.update import Committed, Contributed, Joined, Left, Opened, RunFinished, UpdateStats
from opengyre.proto.weights import Manifest, ShardFile, WeightsApplied, WeightsPublished, WeightsRefused

RUN, TASK, GROUP, EXECUTION = "demo", "rename-17", "demo-g000012", "demo-g000012-e03"
MEMBERS = ("demo-g000012-e02", EXECUTION)

SPEC = TaskSpec(
    task=TASK,
    instruction="rename a.txt to b.txt",
    files={"a.txt": "apple\n"},
    checks=(
        Check(name="moved", command="test -f b.txt", weight=0.5),
        Check(name="gone", command="test ! -e a.txt", weight=0.5),
    ),
    family="rename",
)
DISPATCH = EpisodeDispatch(
    run=RUN,
    group=GROUP,
    execution=EXECUTION,
    members=MEMBERS,
    version=4,
    seed=1234567890,
    task=SPEC,
    harness=Harness(),
    min_members=2,
)
MANIFEST = Manifest(
    run=RUN,
    version=6,
    parent=5,
    step=6,
    directory="/var/lib/gyre/weights/demo/v000006",
    files=(ShardFile(name="model.safetensors", sha256="0" * 64, bytes=1_780_000),),
)
STATS = UpdateStats(executions=16, tokens=220, path_tokens=840, loss=-0.01, score_sum=9.5)
DESIRED = DesiredRole(host="host1", role="train", epoch=7, reason="6 groups wait and 20 executions are live")
_AT: dict[str, Any] = {"run": RUN, "group": GROUP, "execution": EXECUTION, "attempt": 0}
_AT_1: dict[str, Any] = {**_AT, "attempt": 1}
_UPDATE: dict[str, Any] = {"run": RUN, "update": 7, "attempt": "t4f2a"}


def examples() -> list[Event]:
    """An instance of every event, in the order of the loop."""
    return [
        TaskSubmitted(run=RUN, task=TASK, spec=SPEC),
        TaskAdmitted(run=RUN, task=TASK, group=GROUP, executions=MEMBERS, version=4),
        DISPATCH,
        Started(index=0, dispatch=DISPATCH, replica="r1", **_AT),
        SandboxOpened(index=1, sandbox="demo-g000012-e03", node="node0", isolated=True, **_AT),
        Suspended(index=2, turn=0, **_AT),
        Resumed(index=3, turn=0, waited_s=1.5, **_AT),
        Call(
            index=4,
            call="c0",
            turn=0,
            request_digest="0" * 64,
            parent=None,
            prefix_tokens=0,
            prompt_ids=(1, 17, 4),
            sampled_ids=(40, 41, 2),
            logprobs=(-0.5, -0.25, -0.125),
            versions=(VersionSpan(version=4, start=0, end=3),),
            temperature=1.0,
            finish_reason="stop",
            text="mv a.txt b.txt",
            hosts=("host0",),
            parked_s=1.5,
            duration_s=1.75,
            **_AT,
        ),
        ToolResult(
            index=5,
            turn=0,
            exec_id="demo-g000012-e03-t0",
            command="mv a.txt b.txt",
            exit_code=0,
            output="",
            output_bytes=0,
            timed_out=False,
            duration_s=0.004,
            **_AT,
        ),
        TakenOver(index=6, replica="r2", **_AT_1),
        Stepped(index=11, step=1, name="second", **_AT_1),
        Forked(index=10, turn=1, copies=2, snapshot="demo-g000012-e03-fork", **_AT_1),
        Progressed(
            index=7,
            turn=1,
            call="demo-g000012-e03-c0",
            parts=(Part(name="moved", weight=0.5, value=0.0), Part(name="gone", weight=0.5, value=1.0)),
            duration_s=0.02,
            **_AT_1,
        ),
        Verified(
            index=8,
            parts=(Part(name="moved", weight=0.5, value=1.0), Part(name="gone", weight=0.5, value=1.0)),
            **_AT_1,
        ),
        Ended(index=9, reason="done", turns=2, sampled_tokens=5, duration_s=2.0, members=MEMBERS, **_AT_1),
        GroupOverdue(run=RUN, task=TASK, group=GROUP),
        Overdue(run=RUN, group=GROUP),
        GroupScored(
            run=RUN,
            task=TASK,
            group=GROUP,
            outcome="ready",
            scores={MEMBERS[0]: 0.5, EXECUTION: 1.0},
            sampled_version_min=4,
            sampled_version_max=4,
            tokens=9,
            executions=MEMBERS,
            tokens_by={MEMBERS[0]: 4, EXECUTION: 5},
        ),
        GroupReady(
            run=RUN,
            group=GROUP,
            task=TASK,
            version=4,
            executions=(EXECUTION,),
            late=True,
            baseline=0.5,
            scale=2.0,
            group_size=2,
            members=(
                Member(
                    execution=EXECUTION,
                    score=1.0,
                    advantage=1.0,
                    sequences=(
                        Sequence(
                            tokens=(1, 17, 4, 40, 41, 2),
                            spans=(
                                Span(
                                    start=3,
                                    end=6,
                                    logprobs=(-0.5, -0.25, -0.125),
                                    versions=(4, 4, 4),
                                    temperature=1.0,
                                ),
                            ),
                        ),
                    ),
                    trained_tokens=3,
                    path_tokens=6,
                ),
            ),
        ),
        Opened(groups=8, executions=64, **_UPDATE),
        Joined(host="host1", boot="b1", **_UPDATE),
        Contributed(
            host="host1",
            contribution="c1",
            groups=(GROUP,),
            gradient=f"sha256:{'0' * 64}",
            stats=STATS,
            executions=MEMBERS,
            **_UPDATE,
        ),
        Left(host="host1", boot="b1", reason="resume", **_UPDATE),
        Committed(
            version=7,
            published=False,
            groups=(GROUP,),
            executions=MEMBERS,
            staleness=(2,),
            score=0.75,
            gradient_norm=0.4,
            stats=STATS,
            opened_s=1.2,
            **_UPDATE,
        ),
        GroupConsumed(run=RUN, task=TASK, group=GROUP, outcome="trained", version=6, executions=MEMBERS),
        WeightsPublished(run=RUN, manifest=MANIFEST),
        WeightsApplied(run=RUN, version=6, host="host0", boot="b0", duration_s=0.02),
        WeightsRefused(run=RUN, version=6, host="host1", boot="b1", error="model.safetensors: another checksum"),
        HostCommand(desired=DESIRED, decision="5-12"),
        HostStateChanged(
            host="host1",
            cell="host1",
            boot="b1",
            sequence=3,
            before=HostState.DRAINING,
            after=HostState.TRAIN,
            epoch=7,
            version=6,
            live_calls=0,
            moved_calls=4,
            freed_bytes=4_194_304,
            duration_s=0.51,
        ),
        Decision(
            run=RUN,
            decision="5-12",
            kind="roles",
            input=PolicyInput(
                cells=(
                    CellView(
                        cell="host1",
                        hosts=("host1",),
                        state=HostState.ROLLOUT,
                        settled=True,
                        since_s=3.0,
                        capacity=32,
                        running=4,
                    ),
                ),
                live_executions=20,
                ready_groups=6,
                dispatch=Dispatch(),
                elastic=Elastic(),
            ),
            changes=(RoleChange(cell="host1", role="train", reason="6 groups wait"),),
        ),
        RunFinished(run=RUN, update=64, version=64),
        DeadLetter(
            origin_stream="TRAJ",
            consumer="trajectory",
            origin_subject="gyre.v1.traj.demo.demo-g000012.demo-g000012-e03.ended",
            origin_sequence=4711,
            deliveries=1,
            error="undecodable: Object missing required field `turns`",
            payload="{}",
        ),
    ]
