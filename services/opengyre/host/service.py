"""One host: its engine, its training worker, and the role that it was told to have.

The role machine (`roles`) is pure; this shell feeds it with commands, published weights and the ends of activities,
and does what the present state asks for. One activity runs at a time, so engine and training worker never compute at
once. Readers of the bus run beside it.

Awaits: an activity is woken by `turned`, which every event of the machine and every new manifest sets, or by its own
bound. A state's activity is chosen anew each time round, so a wake-up too many changes nothing.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final, assert_never

from starlette.routing import BaseRoute

from opengyre.host import figures
from opengyre.host.door import Door
from opengyre.host.drain import MemoryNotFreedError, end_calls, held, put_to_sleep
from opengyre.host.engine import WAITING_FACTOR, Engine, make_engine, make_learner
from opengyre.host.inference import Inference
from opengyre.host.levels import Levels, levels
from opengyre.host.reporter import Reporter
from opengyre.host.roles import ACTIVITY, Activity, Effect, Event, Position, Signal, advance, ended
from opengyre.host.versions import (
    chosen_run,
    follow_published,
    in_turn,
    last_published,
    replaces,
    retry_after,
    verified,
)
from opengyre.host.worker import Worker
from opengyre.proto import subjects
from opengyre.proto.host import DesiredRole, HostState, HostStateChanged, HostStatus
from opengyre.proto.ids import check_token
from opengyre.proto.run import RunSpec, RunState
from opengyre.proto.weights import Manifest, WeightsApplied, WeightsRefused
from opengyre.shared import metrics
from opengyre.shared.bus import BusError, View
from opengyre.shared.lifecycle import Context
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.types import EngineError
from opengyre.weights.manifest import WeightsError

log = logging.getLogger("gyre.host")

LOOK_AGAIN_S = 10.0
"""An activity that only waits for events looks again after so long."""

VERSION_FAULTS: Final = (WeightsError, ModelDirectoryError, EngineError, OSError)


class EngineFailedError(Exception):
    """The engine ended by itself; the process leaves, to be started again."""


class Host:
    """`levels` are the mirrors that it shares with other hosts of the process; without them it has its own."""

    def __init__(self, context: Context, engine: Engine | None = None, levels: Levels | None = None) -> None:
        settings = context.settings.host
        self._context = context
        self._settings = settings
        self._host = check_token("host.host", settings.host)
        self._cell = check_token("host.cell", settings.cell or settings.host)
        self._boot = uuid.uuid4().hex[:12]
        self._engine = engine or make_engine(settings)
        self._door = Door(int((1 + WAITING_FACTOR) * settings.capacity))
        self.inference = Inference(self._engine, self._door, self._why_not, self._look_for_lapse)
        self._levels = levels
        self._worker = Worker(context, self._host, self._boot, make_learner(settings))
        self._reporter = Reporter(
            context.bus, self._status, self._look_for_lapse, settings.heartbeat_s, settings.lost_after_s
        )
        self._position = Position()
        self._grace_s = DesiredRole(host=self._host, role="rollout", epoch=-1).grace_s
        self._turned = asyncio.Event()
        self._run: str | None = None
        self._run_state: RunState = "active"
        """Of `_run`: only an active one is going to have weights."""
        self._current: Manifest | None = None
        self._applied: Manifest | None = None
        self._loaded: Manifest | None = None
        """What the engine has, whether the broker was told of it or not."""
        self._loaded_in_s = 0.0
        self._refused: set[tuple[str, int]] = set()
        self._failures = 0
        self._fault: str | None = None
        """Why the version that is loaded now was refused last."""
        self._changes = 0
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._since = loop.time()
        self._switch_began: float | None = None
        """None where no role was left: the first join is no switch."""
        self._last_switch_s: float | None = None
        self._told_at: float | None = None
        """When the last command that counted was heard of."""
        self._unmet: str | None = None
        """The state that it asks for, until that is reached."""
        self._moved_before = 0
        self._freed = 0

    def routes(self) -> Sequence[BaseRoute]:
        return self.inference.routes()

    async def run(self) -> None:
        if self._levels is not None:
            await self._live(self._levels)
            return
        async with levels(self._context.bus) as own:
            await self._live(own)

    async def _live(self, told: Levels) -> None:
        self._look()
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._reporter.run()),
                    tasks.create_task(self._follow_run(told.runs)),
                    tasks.create_task(self._obey(told.desired)),
                    tasks.create_task(self._watch_engine()),
                    tasks.create_task(self._stop()),
                ]
                try:
                    await self._act()
                finally:
                    for helper in helpers:
                        helper.cancel()
                    self._worker.close()
            await self._reporter.close()
        finally:
            await self._engine.close()  # what is left of an engine that ended by itself as well

    # What comes in.

    async def _stop(self) -> None:
        await self._context.stopping.wait()
        self._event(Signal.STOP, "the process was told to end")

    async def _obey(self, view: View[DesiredRole]) -> None:
        """The level in `gyre_desired`, whatever commands were missed."""
        while True:
            desired = view.values.get(self._host)
            if desired is not None and desired.epoch > self._position.epoch:
                self._grace_s = desired.grace_s
                self._told_at = self._clock()
                self._unmet = desired.role
                self._event(desired, desired.reason or f"told to be {desired.role}")
            await view.changed(LOOK_AGAIN_S)

    async def _follow_run(self, view: View[RunSpec]) -> None:
        """The active run, and its versions."""
        async with asyncio.TaskGroup() as tasks:
            following: asyncio.Task[None] | None = None
            try:
                while True:
                    run = chosen_run(view.values, view.revisions)
                    state = view.values[run].state if run is not None else self._run_state
                    if state != self._run_state:
                        self._run_state = state
                        self._look()
                        self._turned.set()  # what is waited for is another thing now
                    if run is not None and run != self._run:
                        if following is not None:
                            following.cancel()
                        self._run, self._current = run, None
                        self._event(Signal.RUN_CHANGED, f"run {run} is active")
                        following = tasks.create_task(follow_published(self._context.bus, run, self._found))
                    await view.changed(LOOK_AGAIN_S)
            finally:
                if following is not None:
                    following.cancel()

    def _found(self, manifest: Manifest) -> None:
        if manifest.run == self._run and replaces(self._current, manifest):
            self._current = manifest
            self._failures, self._fault = 0, None
            self._event(Signal.WEIGHTS, f"version {manifest.version} of {manifest.run} is published")

    async def _watch_engine(self) -> None:
        while True:
            if self._engine.stats().state == "closed":
                raise EngineFailedError("the engine ended by itself; the host leaves, to be started again")
            await asyncio.sleep(self._settings.heartbeat_s)

    def _look_for_lapse(self) -> None:
        """Whoever wakes first after the process hung: a call, or the heartbeat."""
        if self._reporter.lapsed:
            self._event(Signal.LAPSED, "its heartbeat had expired; it joins again")

    # The machine.

    def _event(self, event: Event, reason: str) -> None:
        """Let the machine advance, do its effects, tell the change, wake the activity."""
        before = self._position
        self._position, effects = advance(before, event)
        for effect in effects:
            match effect:
                case Effect.ADMIT:
                    self._door.admit()
                case Effect.REFUSE:
                    self._door.refuse()
                case _:
                    assert_never(effect)
        if self._position.state is not before.state:
            self._tell(before.state, reason)
        elif self._position != before:
            self._reporter.changed()
        self._look()
        self._turned.set()

    def _tell(self, before: HostState, reason: str) -> None:
        now = self._clock()
        after = self._position.state
        change = HostStateChanged(
            host=self._host,
            cell=self._cell,
            boot=self._boot,
            sequence=self._changes,
            before=before,
            after=after,
            epoch=self._position.epoch,
            version=self._engine.stats().version,
            live_calls=self._door.live,
            moved_calls=self.inference.moved - self._moved_before if before is HostState.DRAINING else 0,
            freed_bytes=self._freed if before is HostState.DRAINING else 0,
            duration_s=now - self._since,
            obeyed_s=round(now - self._told_at, 6) if self._told_at is not None else None,
            reason=reason,
        )
        self._changes += 1
        self._since = now
        if before is HostState.STARTING:
            self._switch_began = None
        elif after in (HostState.DRAINING, HostState.LEAVING_TRAIN) or before is HostState.CORDONED:
            self._switch_began = now
        if after is HostState.DRAINING:
            self._moved_before = self.inference.moved
        self._observe(after, now)
        if self._switch_began is not None and after in (HostState.ROLLOUT, HostState.TRAIN, HostState.CORDONED):
            self._last_switch_s = now - self._switch_began
            metrics.ROLE_SWITCHES.labels(after.value).inc()
            metrics.SWITCH_SECONDS.labels(after.value).observe(self._last_switch_s)
        log.info("%s -> %s: %s", before.value, after.value, reason)
        self._reporter.changed(change)

    def _observe(self, after: HostState, now: float) -> None:
        """The first time that the state is reached which the last command asked for."""
        asked = self._unmet
        if asked is None or after.value != asked or self._told_at is None:
            return
        self._unmet = None
        metrics.OBEYED_SECONDS.labels(asked).observe(now - self._told_at)

    # What is done in each state.

    async def _act(self) -> None:
        while not ended(self._position):
            self._turned.clear()
            activity = ACTIVITY[self._position.state]
            match activity:
                case Activity.REST:
                    with self._context.waits.on(self._rests_for(), looking=True):
                        await self._wait(LOOK_AGAIN_S)
                case Activity.LOAD | Activity.SERVE:
                    await self._serve_current()
                case Activity.DRAIN:
                    await self._drain()
                case Activity.TRAIN:
                    await self._worker.train(self._turned)
                case Activity.LEAVE:
                    await self._worker.leave()
                    self._event(Signal.LEFT, "handed over")
                case _:
                    assert_never(activity)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._turned.wait()

    async def _serve_current(self) -> None:
        """JOINING and ROLLOUT: bring the engine to the current version; when it is there, wait."""
        manifest = self._current
        asleep = self._engine.stats().state == "asleep"
        if manifest is None or (manifest == self._applied and not asleep):
            if self._position.state is HostState.JOINING and manifest is not None:
                await self._join(manifest)
            else:
                await self._wait(LOOK_AGAIN_S)
            return
        if manifest != self._loaded or asleep:
            began = self._clock()
            again = f", which failed before: {self._fault}" if self._fault is not None else ""
            try:
                with self._context.waits.on(
                    f"version {manifest.version} to be loaded{again}", self._engine.load_bound_s
                ):
                    await verified(manifest)
                    await self._load(manifest, asleep)
            except VERSION_FAULTS as error:
                await self._refuse(manifest, error)
                return
            self._failures, self._fault = 0, None
            self._loaded, self._loaded_in_s = manifest, self._clock() - began
        try:
            await self._acknowledge(manifest, self._loaded_in_s)
        except BusError as error:
            log.warning("version %d could not be acknowledged: %s", manifest.version, error)
            await self._wait(retry_after(0))

    async def _join(self, applied: Manifest) -> None:
        """Let traffic in if what is applied is what the leader of the broker calls current, and the host not LOST."""
        if self._reporter.lapsed:
            with self._context.waits.on("its heartbeat to be taken", retry_after(0)):
                await self._wait(retry_after(0))
            return
        try:
            newest = await last_published(self._context.bus, applied.run)
        except (BusError, TimeoutError) as error:
            log.warning("the current version is not known: %r", error)
            with self._context.waits.on("the broker to say which version is current", retry_after(0)):
                await self._wait(retry_after(0))
            return
        if newest is not None:
            self._found(newest)
        if self._current == applied:
            self._event(Signal.APPLIED, f"version {applied.version} is applied")

    async def _load(self, manifest: Manifest, asleep: bool) -> None:
        directory = Path(manifest.directory)
        if asleep:
            await self._engine.wake(directory, manifest.version)
            if self._settings.dry_switch and self._last_switch_s is None:
                await self._switch_dry(directory, manifest.version)
            await self._engine.resume()
            return
        turn = in_turn(self._context.bus, manifest.run, f"{self._host}-{self._boot}")
        async with turn if self._engine.takes_turns else contextlib.nullcontext():
            await self._engine.pause()
            try:
                await self._engine.load(directory, manifest.version)
            except VERSION_FAULTS:
                # What was served before is served still; of a load that was cancelled that is not known.
                await self._engine.resume()
                raise
            await self._engine.resume()

    async def _switch_dry(self, directory: Path, version: int) -> None:
        """Sleep and wake once, before any traffic: what a switch takes is known before the first real one."""
        if self._position.state is not HostState.JOINING:
            return
        began = self._clock()
        await self._engine.sleep()
        if left := held(self._engine):
            log.error("dry switch: the engine sleeps and holds %d bytes still", left)
        if self._engine.stats().state == "asleep":
            await self._engine.wake(directory, version)
            self._last_switch_s = (self._clock() - began) / 2
            log.info("a dry switch took %.3f s each way", self._last_switch_s)

    async def _acknowledge(self, manifest: Manifest, duration_s: float) -> None:
        """Only what was acknowledged counts as applied; raises `BusError`."""
        event = WeightsApplied(
            run=manifest.run, version=manifest.version, host=self._host, boot=self._boot, duration_s=duration_s
        )
        await self._context.bus.publish(subjects.weights(manifest.run, "applied"), event)
        self._applied = manifest
        metrics.WEIGHT_VERSION.labels(manifest.run).set(manifest.version)
        log.info("version %d of %s applied in %.3f s", manifest.version, manifest.run, duration_s)
        self._reporter.changed()

    async def _refuse(self, manifest: Manifest, error: Exception) -> None:
        """Say so once for each version, keep what is served, and read it again later."""
        log.error("version %d of %s is refused: %s", manifest.version, manifest.run, error)
        if (manifest.run, manifest.version) not in self._refused:
            event = WeightsRefused(
                run=manifest.run, version=manifest.version, host=self._host, boot=self._boot, error=str(error)
            )
            try:
                await self._context.bus.publish(subjects.weights(manifest.run, "refused"), event)
                self._refused.add((manifest.run, manifest.version))
            except BusError as fault:
                log.warning("the refusal could not be told: %s", fault)
        delay = retry_after(self._failures)
        self._failures += 1
        self._fault = str(error)
        with self._context.waits.on(f"version {manifest.version} to be readable: {error}", delay):
            await self._wait(delay)

    async def _drain(self) -> None:
        try:
            with self._context.waits.on("calls to leave and the engine to sleep", self._grace_s):
                await end_calls(self._engine, self._door, self._grace_s, self.inference.ages)
                if self._position.stopping:
                    self._event(Signal.DRAINED, "the process ends, and its memory with it")
                    return
                drained = await put_to_sleep(self._engine)
        except (MemoryNotFreedError, EngineError) as error:
            log.error("drain: %s", error)  # noqa: TRY400 - a known fault; its sentence says all
            with self._context.waits.on(f"the engine to give its memory back: {error}", 1.0):
                await self._context.pause(1.0)
            return
        self._freed = drained.freed_bytes
        self._applied = self._loaded = None
        self._event(Signal.DRAINED, f"the engine sleeps; {drained.freed_bytes} bytes are free")

    # What is said.

    def _rests_for(self) -> str:
        if self._position.state is HostState.CORDONED:
            return f"{self._host} to be resumed: it is cordoned"
        if self._run is None:
            return "an active run"
        if self._run_state != "active":
            return f"an active run: run {self._run} is {self._run_state}"
        return f"the first weights of run {self._run}"

    def _why_not(self) -> str:
        return f"host {self._host} is {self._position.state.value}; calls are taken in the rollout role"

    def _look(self) -> None:
        """Not ready is who has an active run and has not served or trained it yet: a switch of roles is no lack."""
        state = self._position.state
        missing: str | None = None
        if self._run is None or self._run_state != "active":
            pass  # nobody waits for this host
        elif state is HostState.STARTING:
            missing = f"{self._host} has no weights: run {self._run} has published none yet"
        elif state is HostState.JOINING and self._switch_began is None:
            version = self._current.version if self._current else "?"
            missing = f"{self._host} loads version {version}"
        self._context.missing = missing

    def _status(self) -> HostStatus:
        stats = self._engine.stats()
        gauges = self._context.gauges
        gauges["calls_in_flight"] = self._door.live
        gauges["calls_waiting"] = stats.waiting
        gauges["kv_usage"] = stats.kv_usage
        gauges["tokens_per_s"] = stats.tokens_per_s
        gauges["version"] = stats.version
        figures.show(self._host, stats)
        return HostStatus(
            host=self._host,
            cell=self._cell,
            boot=self._boot,
            state=self._position.state,
            epoch=self._position.epoch,
            url=self._context.url,
            engine=self._engine.name,
            run=self._run,
            version=self._applied.version if self._applied else -1,
            capacity=self._engine.capacity,
            running=self._door.live,
            waiting=stats.waiting,
            held_tokens=sum(call.prompt + call.sampled for call in self._engine.progress()),
            tokens_per_s=round(stats.tokens_per_s, 1),
            kv_usage=round(stats.kv_usage, 4),
            prefix_hits=None if stats.prefix_hits is None else round(stats.prefix_hits, 4),
            memory_bytes=held(self._engine),
            training_group=self._worker.group,
            training_update=self._worker.update,
            since_s=round(self._clock() - self._since, 3),
            last_switch_s=self._last_switch_s,
            sampler=self._engine.sampler(),
        )
