"""Cells that are drained, resumed, cordoned and killed (`kill -9`) at random while a run of real services goes on.

The laws, checked on the streams at the end: no episode is interrupted, the books balance, every execution is trained
exactly once, versions grow by one; the tokens of each call are those of an unmoved one under the same seed; no host
serves before it acknowledged the current version; where no host serves, episodes are SUSPENDED, and decisions say so.
"""

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest

from opengyre.cli.demo_facts import balances
from opengyre.emulated.tokens import draw
from opengyre.proto import subjects
from opengyre.proto.codec import encode
from opengyre.proto.decision import CellsReport, Decision
from opengyre.proto.host import DesiredRole, HostCommand, HostState
from opengyre.proto.run import Dispatch, Elastic, Harness, RunSpec
from opengyre.proto.traj import Call, Started
from opengyre.proto.update import Committed
from opengyre.proto.weights import WeightsApplied, WeightsPublished
from opengyre.rollout.recorder import call_seed
from opengyre.shared.bus import Bucket, follow, read
from opengyre.tiny.engine import TinyEngine
from opengyre.tiny.types import EngineSettings, GenerateRequest, GenerateResult
from support.cells import Log, Operator, gaps, operator, prompts, recorded, unexplained
from support.stack import Whole, marked, whole

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(900)]

QUICK = {
    "GYRE_HOST__HEARTBEAT_S": "0.3",
    "GYRE_HOST__LOST_AFTER_S": "2",
    "GYRE_HOST__TOKENS_PER_S": "80",
    "GYRE_HOST__CAPACITY": "16",
    "GYRE_HOST__TRAIN_S_PER_EXECUTION": "0.05",
    "GYRE_ALLOCATOR__LEASE_S": "2",
    "GYRE_LOG__FORMAT": "console",
}
TURNS, GROUPS, MEMBERS = 3, 4, 4
TRAINED_S = 240.0
"""For what is left of a run; it only ends what hangs."""
SUSPENDED_S = 2.0
"""A gap without a serving host that lasts so long is one that episodes must have been suspended in."""


def load_run(model: Path, updates: int, tokens: float) -> RunSpec:
    return RunSpec(
        run="demo",
        model=str(model),
        updates=updates,
        seed=5,
        dispatch=Dispatch(phi=0.5, mu=1, batch_groups=GROUPS, group_size=MEMBERS, min_members=2, close_at=MEMBERS - 1),
        harness=Harness(
            agent="synthetic",
            max_turns=TURNS,
            synthetic_turns=TURNS,
            synthetic_tokens=tokens,
            synthetic_sigma=0.2,
            max_tokens=400,
            context_tokens=512,
        ),
        elastic=Elastic(dwell_s=0.2),
    )


async def check_laws(stack: Whole, log: Log, updates: int) -> None:
    """Laws 1 to 4, from the streams and the allocator's own report."""
    facts, report = await stack.driver.conclude()
    assert facts.interrupted == 0
    assert all(reasons == ["done"] for reasons in log.ended.values()), Counter(map(str, log.ended.values()))
    assert len(log.ended) == updates * GROUPS * MEMBERS
    assert report is not None
    assert balances(report.groups)
    assert balances(report.executions)
    assert (report.groups.trained, report.groups.live, report.groups.ready) == (updates * GROUPS, 0, 0)
    assert report.executions.trained == updates * GROUPS * MEMBERS

    stored = await read(stack.bus, subjects.UPDATES, subjects.update("demo", "committed"))
    committed = [event for message in stored if isinstance(event := message.event(), Committed)]
    assert [event.version for event in committed] == list(range(1, updates + 1))
    trained = Counter(name for event in committed for name in event.executions)
    assert trained.keys() == log.ended.keys()
    assert set(trained.values()) == {1}
    assert all(d >= 0 for event in committed for d in event.staleness)
    letters = await read(stack.bus, subjects.DLQ, "gyre.v1.dlq.>")
    assert [message.payload for message in letters] == []


async def check_joins(stack: Whole, log: Log) -> None:
    """Law 4: who comes to ROLLOUT has acknowledged the newest version of the moment in which it did so."""
    stored = await read(stack.bus, subjects.WEIGHTS, subjects.weights("demo", "*"))
    published = [(s.timestamp, e.manifest.version) for s in stored if isinstance(e := s.event(), WeightsPublished)]
    applied: dict[tuple[str, int], list[float]] = {}
    for message in stored:
        if isinstance(event := message.event(), WeightsApplied):
            applied.setdefault((event.boot, event.version), []).append(message.timestamp)
    joins = 0
    for at, change in log.changes:
        if change.after is HostState.ROLLOUT:
            joins += 1
            # Who comes back to the same version acknowledges it anew, which after minutes is another message.
            earlier = [when for when in applied[change.boot, change.version] if when <= at]
            assert earlier
            acknowledged = earlier[-1]
            assert change.version >= max(version for when, version in published if when <= acknowledged)
        # Calls are taken in ROLLOUT only, so none was there when it came to JOINING from elsewhere.
        if change.after is HostState.JOINING and change.before is not HostState.ROLLOUT:
            assert change.live_calls == 0
    assert joins > 0


async def check_suspensions(stack: Whole, log: Log, man: Operator) -> int:
    """Never zero serving hosts without an explicit SUSPENDED; how many gaps were long enough to say so."""
    last = max(at for at, _ in log.traj)
    long = [(start, end) for start, end in gaps(log, man.kills, last) if end - start >= SUSPENDED_S]
    for gap in long:
        assert unexplained(log, gap) == set(), (gap, man.said)
    for message in await read(stack.bus, subjects.DECISIONS, subjects.decision("demo")):
        decision = message.event()
        if not isinstance(decision, Decision) or decision.input is None or not decision.input.live_executions:
            continue
        after = {change.cell: change.role for change in decision.changes}
        roles = {cell.cell: after.get(cell.cell, cell.role or "rollout") for cell in decision.input.cells}
        if after and "rollout" not in roles.values():
            assert decision.suspends, decision
    return len(long)


def check_tokens(log: Log, model: Path) -> int:
    """Every call says what the emulated engine's pure function says for its seed and place; how many were moved."""
    vocabulary = int(msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"])
    seeds = {event.execution: event.dispatch.seed for _, event in log.traj if isinstance(event, Started)}
    before = prompts(log.calls)
    for call in log.calls:
        seed, start = call_seed(seeds[call.execution], call.turn), len(before[call.execution, call.call])
        tokens, logprobs = draw(seed, start, len(call.sampled_ids), vocabulary)
        assert call.sampled_ids == tokens, call.hosts
        assert call.logprobs == pytest.approx(logprobs)
    return sum(len(call.hosts) > 1 for call in log.calls)


async def test_200_drains_resumes_cordons_and_kills_interrupt_no_episode(tmp_path: Path, policy: Path) -> None:
    state, updates, operations = tmp_path / "state", 16, 200
    spec = load_run(policy, updates, tokens=200)
    async with (
        whole(state, spec, hosts=4, engine="emulated", environment=QUICK) as stack,
        operator(stack, "demo", seed=11) as man,
    ):
        training = asyncio.create_task(stack.driver.train())

        def kill_leader() -> None:
            pid = stack.run.supervisor.children["allocator"].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                man.said.append("kill allocator")

        calls = updates * GROUPS * MEMBERS * TURNS
        await man.many(operations, calls * 65 // 100, {60: kill_leader, 130: kill_leader})
        assert not stack.driver.facts.finished, "the run was over before the operations were: give it more updates"
        for host in man.names:
            await man.wish(host, "resume", waits=False)
        await asyncio.wait_for(training, TRAINED_S)

        log = await recorded(stack, "demo")
        await check_laws(stack, log, updates)
        await check_joins(stack, log)
        assert await check_suspensions(stack, log, man) > 0

        moved = check_tokens(log, policy)
        assert min(man.done[verb] for verb in ("drain", "resume", "cordon")) >= 30
        assert man.done["kill"] >= 15
        assert moved >= 50
    assert marked(state) == {}


async def fresh_calls(man: Operator, host: str, since: float, count: int) -> list[Call]:
    """Calls that began after `since` and that `host` alone served, once there are so many."""

    def found() -> list[Call]:
        return [call for at, call in man.tap.calls if call.hosts == (host,) and at - call.duration_s > since]

    assert await man.tap.wait(lambda: len(found()) >= count, 90), (man.hosts.values, len(man.tap.calls))
    return found()


async def ask(url: str, run: str) -> tuple[int, str]:
    """A call straight to a host; its status and the kind of its refusal."""
    body = {"request_id": "straight", "token_ids": [20], "model": run, "sampling_params": {"max_tokens": 1}}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=400)) as session,
        session.post(f"{url}/inference/v1/generate", json=body) as response,
    ):
        return response.status, (await response.json()).get("error", {}).get("type", "")


async def check_fences(stack: Whole, man: Operator, host: str) -> None:
    """Law 8: an old command that comes again changes nothing, as an event and as a level, and hinders no new one."""
    bucket = Bucket(stack.bus, subjects.KV_DESIRED, DesiredRole)
    await man.wish(host, "resume")
    old = await bucket.get(host)
    await man.wish(host, "drain")
    before = man.hosts.values[host]
    changes = len((await recorded(stack, "demo")).changes)
    assert old is not None
    assert (old[0].role, before.state) == ("rollout", HostState.TRAIN)
    assert old[0].epoch < before.epoch
    # Under an id of its own, or the broker would take it for the one that it has.
    command = encode(HostCommand(desired=old[0]))
    await stack.bus.publish_raw(subjects.host(host, "command"), command, "again", "host.command.v1")
    level = await bucket.put(host, old[0])
    for _ in range(3):
        beat = man.hosts.revisions[host]
        assert await stack.wait(lambda beat=beat: man.hosts.revisions.get(host, 0) > beat, 60)
        assert (man.hosts.values[host].state, man.hosts.values[host].epoch) == (HostState.TRAIN, before.epoch)
    assert len((await recorded(stack, "demo")).changes) == changes
    await man.wish(host, "resume")
    last = await bucket.get(host)
    assert last is not None
    assert (last[0].epoch, last[1]) > (before.epoch, level)
    assert man.hosts.values[host].state is HostState.ROLLOUT


async def test_a_host_that_hangs_is_lost_and_joins_anew(tmp_path: Path, policy: Path) -> None:
    """SIGSTOP closes no connection: its calls go on elsewhere, and it serves nothing stale when it wakes up."""
    state, updates = tmp_path / "state", 10
    async with (
        whole(state, load_run(policy, updates, tokens=200), hosts=2, engine="emulated", environment=QUICK) as stack,
        operator(stack, "demo", seed=1) as man,
    ):
        training = asyncio.create_task(stack.driver.train())
        await fresh_calls(man, "host1", 0, 1)
        assert await stack.wait(lambda: _busy(man, "host1"), 90), man.hosts.values
        frozen = man.hosts.values["host1"]
        pid = stack.run.supervisor.children["host1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            straight = asyncio.create_task(ask(frozen.url, "demo"))
            assert await stack.wait(lambda: "host1" not in man.hosts.values, 60), "it is not LOST"
            cells = await stack.api.get("/v1/cells", CellsReport)
            assert {cell.cell: cell.state for cell in cells.cells}["host1"] == "lost"
            # Its calls have to go on elsewhere for these to be trained.
            newer = max(stack.driver.facts.published) + 2
            assert await stack.wait(lambda: newer in stack.driver.facts.published, 180), stack.driver.shown.waits
        finally:
            woken = time.time()
            os.kill(pid, signal.SIGCONT)
        assert await straight == (503, "not_serving")
        calls = await fresh_calls(man, "host1", woken, 3)
        assert min(span.version for call in calls for span in call.versions) >= newer
        await asyncio.wait_for(training, TRAINED_S)

        log = await recorded(stack, "demo")
        own = [(at, change) for at, change in log.changes if change.host == "host1" and at > woken]
        assert [(c.before, c.after) for _, c in own[:2]] == [
            (HostState.ROLLOUT, HostState.JOINING),
            (HostState.JOINING, HostState.ROLLOUT),
        ]
        assert own[1][1].version >= newer
        await check_laws(stack, log, updates)
        await check_joins(stack, log)
        check_tokens(log, policy)
        await check_fences(stack, man, "host0")
    assert marked(state) == {}


def _busy(man: Operator, host: str) -> bool:
    status = man.hosts.values.get(host)
    return status is not None and status.state is HostState.ROLLOUT and status.running > 0


async def follow_versions(stack: Whole, kept: Path) -> None:
    """Keep what the trainer prunes: a link to each version as it is published."""
    async for stored in follow(stack.bus, subjects.WEIGHTS, subjects.weights("demo", "published")):
        event = stored.event()
        if isinstance(event, WeightsPublished):
            shutil.copytree(event.manifest.directory, kept / str(event.manifest.version), copy_function=os.link)


def again(directory: Path, calls: Sequence[tuple[GenerateRequest, Call]], version: int) -> list[GenerateResult]:
    """The same requests to an engine that nobody disturbs."""
    engine = TinyEngine(directory, version, EngineSettings(max_batch=16, threads=1))
    try:
        return [future.result(240) for future in [engine.submit(request) for request, _ in calls]]
    finally:
        engine.close()


async def test_moved_calls_of_tiny_engines_give_the_tokens_of_unmoved_ones(tmp_path: Path, policy: Path) -> None:
    """The same with engines that compute: a call that was moved is made again where nothing moves."""
    state, updates, operations, kept = tmp_path / "state", 4, 40, tmp_path / "kept"
    environment = {name: QUICK[name] for name in ("GYRE_HOST__HEARTBEAT_S", "GYRE_HOST__LOST_AFTER_S")}
    async with (
        whole(state, load_run(policy, updates, tokens=300), hosts=3, environment=environment) as stack,
        operator(stack, "demo", seed=3) as man,
    ):
        man.verbs = {**man.verbs, "kill": 6}  # a host that computes takes seconds to start
        keeping = asyncio.create_task(follow_versions(stack, kept))
        training = asyncio.create_task(stack.driver.train())
        await man.many(operations, updates * GROUPS * MEMBERS * TURNS * 92 // 100, {})
        assert not stack.driver.facts.finished, "the run was over before the operations were: give it more updates"
        for host in man.names:
            await man.wish(host, "resume", waits=False)
        await asyncio.wait_for(training, TRAINED_S)
        keeping.cancel()
        log = await recorded(stack, "demo")
        await check_laws(stack, log, updates)
        await check_joins(stack, log)
    assert marked(state) == {}

    seeds = {event.execution: event.dispatch.seed for _, event in log.traj if isinstance(event, Started)}
    before = prompts(log.calls)
    moved: dict[int, list[tuple[GenerateRequest, Call]]] = {}
    for call in log.calls:
        if len(call.hosts) > 1 and len(call.versions) == 1:
            request = GenerateRequest(
                f"{call.execution}-{call.call}",
                before[call.execution, call.call],
                len(call.sampled_ids),
                seed=call_seed(seeds[call.execution], call.turn),
                temperature=call.temperature,
                ignore_eos=True,
            )
            moved.setdefault(call.versions[0].version, []).append((request, call))
    assert man.done["kill"] >= 1
    assert sum(map(len, moved.values())) >= 5, (man.done, len(log.calls))
    for version, calls in moved.items():
        results = await asyncio.to_thread(again, kept / str(version), calls, version)
        for (_, call), result in zip(calls, results, strict=True):
            assert call.sampled_ids == result.token_ids, call.hosts
            assert call.logprobs == pytest.approx(result.logprobs, abs=1e-4)
