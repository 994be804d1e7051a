"""Emulated hosts, many in one process, under the real router and recorder: loads, drains in mid-call, weights."""

import asyncio
import contextlib
import functools
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.host.emulated import EmulatedEngine, EmulatedLearner
from opengyre.host.many import Hosts
from opengyre.learn.codec import unflatten
from opengyre.proto import ids, subjects
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.host import DesiredRole, HostState, HostStateChanged, HostStatus
from opengyre.proto.run import Optimization
from opengyre.proto.traj import AnyTrajEvent, Call, Ended, SandboxOpened, Suspended, Verified
from opengyre.proto.update import WorkItem
from opengyre.proto.weights import Manifest, WeightsPublished
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, read
from opengyre.shared.http import app_of, listen, serving_http
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import HostSettings, Settings
from opengyre.tiny.checkpoint import load_pretrained, save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import version_directory, write_version
from support import eventually
from support.gradients import flatten, written
from support.rollout_fakes import Stack, dispatch
from support.running_host import reached

pytestmark = pytest.mark.torch

HOSTS = ("h-000", "h-001")
SLOW = 6
"""Tokens a second, so few that a call of 60 is there for as long as it is looked at, also by a machine that stalls."""
LOAD = {"agent": "synthetic", "max_turns": 2, "synthetic_turns": 2, "synthetic_tokens": 120.0, "max_tokens": 1000}


def write(stack: Stack, version: int) -> Manifest:
    tokenizer = stack.tokenizer
    model = TinyModel(TinyConfig(tokenizer.vocab_size, 32, bos_token_id=0, eos_token_id=1), version)
    save_pretrained(model, stack.model)
    return write_version(
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        version_directory(stack.folder / "weights", version),
        run="r",
        version=version,
        parent=None,
        step=version,
        extra={"config.json": (stack.model / "config.json").read_bytes()},
    )


async def publish(stack: Stack, version: int) -> Manifest:
    manifest = write(stack, version)
    await stack.bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))
    return manifest


class Fleet:
    """Hosts of one process, as their levels and statuses show them."""

    def __init__(self, bus: Bus, hosts: Hosts) -> None:
        self._hosts = hosts
        self.statuses = Bucket(bus, subjects.KV_HOSTS, HostStatus)
        self.desired = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
        self._bus = bus
        self._epoch = 0

    async def tell(self, host: str, role: str, grace_s: float = 0.0) -> None:
        self._epoch += 1
        level = DesiredRole(host=host, role=role, epoch=self._epoch, grace_s=grace_s)  # type: ignore[arg-type]  # fields by keyword, checked at run time
        await self.desired.put(host, level)

    def speed_up(self) -> None:
        """What was to be seen of the calls under way was seen: they may end."""
        for host in self._hosts._hosts.values():
            engine = host._engine
            assert isinstance(engine, EmulatedEngine)
            engine._go_on()
            engine._accelerator.speed = 1000.0
            engine._go_on()

    async def reach(self, host: str, state: HostState) -> HostStatus:
        """Wait until it says that it is in this state; that status, whatever it says next."""
        return await reached(self.statuses, host, state)

    async def became(self, host: str, state: HostState) -> HostStateChanged:
        """Its last change, once that is the one to this state: it is told after the status."""
        found: list[HostStateChanged] = []

        async def told() -> bool:
            stored = await read(self._bus, subjects.HOSTS, subjects.host(host, "state"))
            found[:] = [event for event in (s.event() for s in stored) if isinstance(event, HostStateChanged)][-1:]
            return [change.after for change in found] == [state]

        await eventually(told)
        return found[0]

    async def until(self, host: str, condition: Callable[[HostStatus], Any]) -> HostStatus:
        """Wait for a status of the host in the rollout role of which it is true."""
        found: list[HostStatus] = []

        async def there() -> bool:
            status = await self.statuses.get(host)
            found[:] = [] if status is None else [status[0]]
            return bool(found) and found[0].state is HostState.ROLLOUT and condition(found[0])

        await eventually(there)
        return found[0]


@contextlib.asynccontextmanager
async def fleet(stack: Stack, **more: Any) -> AsyncIterator[Fleet]:
    own = {"host": "h", "engine": "emulated", "count": 2, "heartbeat_s": 0.2, "capacity": 4, "lost_after_s": 120}
    settings = Settings(state_dir=stack.folder / "state", host=HostSettings(**{**own, **more}))
    sock = listen(settings.http)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with Blobs(settings.state_dir / "blobs", settings.cache) as blobs:
        context = Context("host", "hosts", settings, stack.bus, blobs, url)
        hosts = Hosts(context)
        async with serving_http(sock, app_of(list(hosts.routes()))):
            running = asyncio.create_task(hosts.run())
            try:
                yield Fleet(stack.bus, hosts)
            finally:
                context.stopping.set()
                await asyncio.wait_for(running, 60)


@pytest.fixture
async def stack(bus: Bus, nats_server: Any, tmp_path: Path) -> Stack:
    made = Stack(bus, tmp_path, nats_server.url)
    await made.prepare()
    await publish(made, 0)
    return made


def sampled(events: list[AnyTrajEvent]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(event.sampled_ids, event.logprobs) for event in events if isinstance(event, Call)]


async def test_calls_that_move_in_mid_call_and_park_give_the_tokens_of_unmoved_ones(stack: Stack) -> None:
    """Law 1, and section 4: what the agent sees of a drain is a slow call."""
    base = dispatch(**LOAD)
    calm = msgspec.structs.replace(base, execution=ids.execution_id(base.group, 0))
    moved = msgspec.structs.replace(base, execution=ids.execution_id(base.group, 1))
    async with fleet(stack, tokens_per_s=1000) as quick, stack.service():
        for host in HOSTS:
            await quick.reach(host, HostState.ROLLOUT)
        await stack.submit(calm)
        await eventually(lambda: stack.ended(calm))
    clock = asyncio.get_running_loop().time
    async with fleet(stack, tokens_per_s=SLOW) as hosts, stack.service():
        for host in HOSTS:
            status = await hosts.reach(host, HostState.ROLLOUT)
            assert status.last_switch_s is not None
            assert status.url.endswith(f"/h/{host}")
        began = clock()
        await stack.submit(moved)
        for _ in range(3):
            busy = await busy_host(hosts)
            assert busy.held_tokens > 0
            other = next(host for host in HOSTS if host != busy.host)
            await hosts.reach(other, HostState.ROLLOUT)
            await hosts.tell(busy.host, "train")
            status = await hosts.reach(busy.host, HostState.TRAIN)
            assert status.memory_bytes == 0
            last = await hosts.became(busy.host, HostState.TRAIN)
            assert (last.before, last.moved_calls) == (HostState.DRAINING, 1)
            assert last.obeyed_s is not None
            assert last.freed_bytes > 0
            await hosts.tell(busy.host, "rollout")
            await hosts.reach(busy.host, HostState.ROLLOUT)
        for host in HOSTS:
            await hosts.tell(host, "train")

        async def parked() -> bool:
            return any(isinstance(event, Suspended) for event in await stack.log(moved))

        await eventually(parked)
        hosts.speed_up()
        for host in HOSTS:
            await hosts.tell(host, "rollout")
        await eventually(lambda: stack.ended(moved))
        took = clock() - began
    before, after = await stack.log(calm), await stack.log(moved)
    assert sampled(after) == sampled(before)
    assert sum(len(tokens) for tokens, _ in sampled(after)) >= 60
    calls = [event for event in after if isinstance(event, Call)]
    moves = [idle for call in calls for idle in call.moves_s]
    assert len(moves) >= 4
    assert all(idle >= 0 for idle in moves)
    assert sum(moves) < took
    assert all(len(call.moves_s) >= len(call.hosts) - 1 for call in calls)
    assert not any(isinstance(event, SandboxOpened) for event in after)
    verified, end = after[-2:]
    assert isinstance(verified, Verified)
    assert isinstance(end, Ended)
    assert end.reason == "done"
    assert verified.parts[0].output.startswith("synthetic")
    assert not stack.sandboxes.created


async def busy_host(hosts: Fleet) -> HostStatus:
    """Who has the one call in flight, with at least one token of it."""
    found: list[HostStatus] = []

    async def one_is() -> bool:
        found.clear()
        for host in HOSTS:
            status = await hosts.statuses.get(host)
            if status is not None and status[0].running and status[0].state is HostState.ROLLOUT:
                found.append(status[0])
        return bool(found)

    await eventually(one_is)
    return found[0]


async def test_versions_are_loaded_under_live_calls_with_their_spans(stack: Stack) -> None:
    episode = dispatch(**LOAD)
    async with fleet(stack, tokens_per_s=SLOW) as hosts, stack.service():
        for host in HOSTS:
            await hosts.reach(host, HostState.ROLLOUT)
        await stack.submit(episode)
        busy = await busy_host(hosts)
        await hosts.until(busy.host, lambda status: status.held_tokens > busy.held_tokens)
        await publish(stack, 1)
        for host in HOSTS:
            await hosts.until(host, lambda status: status.version == 1)
        hosts.speed_up()
        await eventually(lambda: stack.ended(episode))
    calls = [event for event in await stack.log(episode) if isinstance(event, Call)]
    assert [span.version for span in calls[0].versions] == [0, 1]
    assert [span.version for span in calls[1].versions] == [1]
    for call in calls:
        edges = [0, *(span.end for span in call.versions)]
        assert [span.start for span in call.versions] == edges[:-1]
        assert edges[-1] == len(call.sampled_ids)


async def test_a_host_that_joins_takes_calls_over_from_one_that_has_too_many(stack: Stack) -> None:
    """Hosts join one after the other; the first must not keep what was parked for all."""
    load = LOAD | {"synthetic_turns": 1, "synthetic_sigma": 0.0}
    episodes = [dispatch(number=number, **load) for number in range(4)]
    async with fleet(stack, capacity=1, tokens_per_s=2 * SLOW) as hosts, stack.service():
        await hosts.reach(HOSTS[1], HostState.ROLLOUT)
        await hosts.tell(HOSTS[1], "cordoned")
        await hosts.reach(HOSTS[1], HostState.CORDONED)
        await hosts.reach(HOSTS[0], HostState.ROLLOUT)
        for episode in episodes:
            await stack.submit(episode)

        all_in = await hosts.until(HOSTS[0], lambda status: status.running == len(episodes))
        # Two tokens of each: who has none of a call is not among its hosts.
        await hosts.until(HOSTS[0], lambda status: status.held_tokens >= all_in.held_tokens + 2 * len(episodes))
        await hosts.tell(HOSTS[1], "rollout")
        await hosts.until(HOSTS[1], lambda status: status.running)
        hosts.speed_up()
        for episode in episodes:
            await eventually(functools.partial(stack.ended, episode))
    calls = [event for episode in episodes for event in await stack.log(episode) if isinstance(event, Call)]
    assert len(calls) == len(episodes)
    moved = [call for call in calls if call.moves_s]
    assert moved
    assert all(call.hosts == HOSTS for call in moved)
    assert {len(call.sampled_ids) for call in calls} == {120}


async def test_a_switch_takes_what_the_settings_say(stack: Stack) -> None:
    async with fleet(stack, switch_s=3000, time_scale=10_000) as hosts:
        status = await hosts.reach(HOSTS[0], HostState.ROLLOUT)
        assert status.last_switch_s is not None
        assert status.last_switch_s >= 0.3
        await hosts.tell(HOSTS[0], "train")
        status = await hosts.reach(HOSTS[0], HostState.TRAIN)
        assert status.last_switch_s is not None
        assert status.last_switch_s >= 0.3


async def test_a_gradient_of_zeros_has_the_shape_of_the_model_and_its_time_is_counted(stack: Stack) -> None:
    manifest = write(stack, 3)
    learner = EmulatedLearner(HostSettings(engine="emulated", train_s_per_execution=5000, time_scale=100_000))
    span = Span(start=1, end=3, logprobs=(-1.0, -1.0), versions=(3, 1), temperature=1.0)
    member = Member(
        execution="r-g000000-e00", score=0.5, advantage=1.0, trained_tokens=2, path_tokens=3,
        sequences=(Sequence(tokens=(1, 2, 3), spans=(span,)),),
    )  # fmt: skip
    group = GroupReady(run="r", group="r-g000000", task="t", version=1, members=(member, member))
    item = WorkItem(update=4, attempt="a", base=manifest, group=group, weight=0.5, optimization=Optimization())
    held = await learner.add(item, group.members, None, "one")
    held = await learner.add(item, group.members, held, "one")
    assert (held.stats.executions, held.stats.tokens, held.stats.token_staleness_sum) == (4, 8, 8)
    assert 0.19 < held.stats.busy_s < 60
    model = load_pretrained(Path(manifest.directory))
    like = {name: parameter.detach() for name, parameter in model.named_parameters()}
    content = await written(learner, held)
    gradient = unflatten(content, like)
    assert not any(tensor.any() for tensor in gradient.values())
    assert content == flatten(gradient)


def test_a_process_of_emulated_hosts_loads_no_torch(python: str) -> None:
    code = "import sys, opengyre.host.many, opengyre.host.emulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([python, "-c", code], timeout=60).returncode == 0
