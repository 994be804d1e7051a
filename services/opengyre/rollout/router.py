"""Brings each model call to a host in the rollout role, moves it when its host drains, parks it when there is none.

Invariants:
- A call's tokens so far are never thrown away: they come in increments, and where a host stops the call, is killed or
  is lost, the next one continues after what came, under the same seed. What the host had not yet sent is sampled again.
- Who listens to a call hears each of its tokens once, in order, and none that is not in its completion.
- A host is asked only for runs that do not refuse it (`opengyre.proto.handshake`), and only while its status says
  ROLLOUT; one that failed is left alone until it says something new, or for `AVOID_S`. A call that a host holds when
  it is LOST goes on elsewhere: a process that hangs closes no connection.
- A call that is taken away from an overloaded host goes on elsewhere with its tokens; it is asked back once.
- With `hedge_after_s` a call of which no token has come for so long is also asked of a host that has room: the first
  token decides whose tokens are the call's, and the other host is left (`hedge`).
- No failure of a host ends a call: it ends with a completion, a refusal of the request itself, or its caller's
  cancellation.

Awaits: a call in flight is woken by its host (at most `call_timeout_s`), and looks every `LOOK_S` whether that is LOST;
one that is hedged by either host, and by `hedge_after_s`;
a waiting one by a change of a host's status or the end of a call here, and looks again every `LOOK_S`. `balance` looks
every `BALANCE_S`.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import aiohttp
import msgspec

from opengyre.proto.handshake import refusal
from opengyre.proto.host import HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.traj import VersionSpan
from opengyre.rollout.balance import choose, spare, surplus
from opengyre.rollout.engine import (
    GenerateRequest,
    Hear,
    NotServedError,
    Part,
    Received,
    SamplingParams,
    generate,
    recall,
)
from opengyre.rollout.hedge import Race
from opengyre.rollout.spans import add, stage
from opengyre.shared import metrics
from opengyre.shared.bus import View
from opengyre.shared.waits import Waits

log = logging.getLogger("gyre.rollout.router")

LOOK_S = 1.0
AVOID_S = 1.0
BALANCE_S = 0.1
"""Between two looks at the balance: calls that were placed while hosts joined are moved as soon as all have."""
RECALL_S = 5.0
LOST_LOOKS = 3
"""A host without a heartbeat is given up after so many looks: after an outage of the broker all lack one at first."""
QUIET_S = 1.0
"""Between the increments of a call that nobody listens to: what may be lost with its host."""
SETTLE_S = 0.1
"""A call that finds no host for less than this is late, not parked."""


class Parking(Protocol):
    """Told when a call is parked and when it goes on."""

    async def park(self) -> None: ...

    async def unpark(self, waited_s: float) -> None: ...

    def forsake(self) -> None:
        """The call is given up while it is parked."""
        ...


@dataclass
class Home:
    """Where an execution's calls went last: what they have in common may still be there."""

    host: str | None = None


@dataclass(frozen=True)
class Generation:
    """What is to be sampled."""

    request: str
    """Unique among all requests that may be in flight."""
    run: str
    tokens: tuple[int, ...]
    params: SamplingParams
    prefer: str | None = None
    """The host that has served what this one goes on from."""
    home: Home = field(default_factory=Home)
    """Of its execution; it is kept here."""
    interval_s: float = QUIET_S
    """Between increments."""
    hear: Hear | None = None


@dataclass(frozen=True)
class Completion:
    """All that was sampled for a call, by however many hosts."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    finish: Literal["stop", "length", "abort"] = "abort"
    hosts: tuple[str, ...] = ()
    parked_s: float = 0.0
    moves_s: tuple[float, ...] = ()
    """Of each move: how long nobody worked on the call, from the answer of the host that stopped it to its place in the
    next engine, without parking."""


def joined(so_far: Completion, part: Part, host: str, limit: int, stops: tuple[int, ...]) -> Completion:
    """`so_far` continued by what `host` sampled; a part that was stopped where it would have ended anyway has ended."""
    base = len(so_far.tokens)
    spans = list(so_far.versions)
    for span in part.versions:
        if span.start == span.end:
            continue
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(version=span.version, start=spans[-1].start, end=base + span.end)
        else:
            spans.append(VersionSpan(version=span.version, start=base + span.start, end=base + span.end))
    tokens = so_far.tokens + part.tokens
    finish = part.finish
    if finish == "abort" and tokens and tokens[-1] in stops:
        finish = "stop"
    elif finish == "abort" and len(tokens) >= limit:
        finish = "length"
    hosts = so_far.hosts if part.finish == "abort" and not part.tokens else (*so_far.hosts, host)
    return replace(
        so_far,
        tokens=tokens,
        logprobs=so_far.logprobs + part.logprobs,
        versions=tuple(spans),
        finish=finish,
        hosts=hosts,
    )


@dataclass(frozen=True)
class _Served:
    """What a host made of a call. `failed`: it did not answer; `recalled`: it was asked to give it back; `enough`: who
    listens needs no more."""

    host: str
    part: Part
    failed: bool
    recalled: bool
    enough: bool


@dataclass
class Router:
    view: View[HostStatus]
    runs: View[RunSpec]
    session: aiohttp.ClientSession
    waits: Waits
    call_timeout_s: float
    hedge_after_s: float | None = None
    in_flight: Counter[str] = field(default_factory=Counter)
    _requests: dict[str, dict[str, str]] = field(default_factory=dict)
    """Host -> the requests that it has of ours, the newest last, with their run."""
    _recalled: set[str] = field(default_factory=set)
    """Requests that we asked a host to give back."""
    _avoided: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Host -> the revision of its status and the time when it failed us."""
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def calls_in_flight(self) -> int:
        return self.in_flight.total()

    async def complete(self, call: Generation, parking: Parking) -> Completion:
        """Sample until the call is finished; raises `RefusedError` when a host refuses the request itself."""
        done = Completion()
        clock = asyncio.get_running_loop().time
        stopped: float | None = None
        parked_before = 0.0
        limit = call.params.max_tokens
        tries = 0
        prefer = call.prefer or call.home.host
        while True:
            with stage("route"):
                host, waited = await self._place(call, prefer, parking)
            tries += 1
            done = replace(done, parked_s=done.parked_s + waited)
            call.home.host = host.host
            request = GenerateRequest(
                request_id=f"{call.request}-{tries}",
                token_ids=call.tokens + done.tokens,
                model=call.run,
                sampling_params=_left(call.params, limit - len(done.tokens)),
                # What was moved has waited its turn already.
                priority=-1 if done.tokens else 0,
                stream_interval_s=self._interval_s(call),
            )
            asked = time.perf_counter()  # the loop's clock goes by milliseconds
            served = await self._serve(call, host, request)
            part = served.part
            if served.failed and not part.tokens:
                continue
            now = clock()
            add("engine", part.engine_s)
            add("host", max(0.0, time.perf_counter() - asked - part.engine_s))
            if stopped is not None:
                idle_s = max(0.0, now - stopped - part.engine_s - (done.parked_s - parked_before))
                metrics.MOVE_SECONDS.observe(idle_s)
                done = replace(done, moves_s=(*done.moves_s, round(idle_s, 6)))
            stopped, parked_before = now, done.parked_s
            done = joined(done, part, served.host, limit, call.params.stop_token_ids)
            if served.enough and done.finish == "abort":
                done = replace(done, finish="stop")
            if done.finish != "abort":
                return done
            log.debug("host %s stopped %s after %d tokens", served.host, request.request_id, len(part.tokens))
            if not served.recalled:
                self._avoid(served.host)
            prefer = None

    def _interval_s(self, call: Generation) -> float:
        """A call that may be hedged says soon that it has begun."""
        return call.interval_s if self.hedge_after_s is None else min(call.interval_s, self.hedge_after_s / 2)

    async def _serve(self, call: Generation, host: HostStatus, request: GenerateRequest) -> _Served:
        """Ask `host`, whose place is taken, and another one as well where that says nothing for long."""
        if self.hedge_after_s is None:
            return await self._one(call.run, host, request, Received(call.hear))
        race = Race(call.hear)

        def enter(chosen: HostStatus, asked: GenerateRequest) -> Coroutine[None, None, _Served]:
            return self._one(call.run, chosen, asked, Received(race.entrant()))

        def another() -> Coroutine[None, None, _Served] | None:
            avoided = {host.host, *self._avoids(asyncio.get_running_loop().time())}
            other = spare(self._open_to(call.run), call.run, self.in_flight, avoided)
            if other is None:
                return None
            self.in_flight[other.host] += 1
            log.info("host %s has said nothing of %s; %s is asked too", host.host, request.request_id, other.host)
            return enter(other, msgspec.structs.replace(request, request_id=f"{request.request_id}-h"))

        served = await race.run(enter(host, request), another, self.hedge_after_s)
        call.home.host = served.host
        return served

    async def _one(self, run: str, host: HostStatus, request: GenerateRequest, received: Received) -> _Served:
        """Ask a host, whose place is taken and given back here."""
        self._requests.setdefault(host.host, {})[request.request_id] = run
        failed = False
        try:
            part = await self._ask(host, request, received)
        except NotServedError as error:
            part = received.part()
            failed = True
            log.info(
                "host %s did not serve %s, of which %d tokens came: %s",
                host.host, request.request_id, len(part.tokens), error,
            )  # fmt: skip
            self._avoid(host.host)
        finally:
            self._free(host.host)
            del self._requests[host.host][request.request_id]
            recalled = request.request_id in self._recalled
            self._recalled.discard(request.request_id)
        return _Served(host.host, part, failed, recalled, received.enough)

    async def _ask(self, host: HostStatus, request: GenerateRequest, received: Received) -> Part:
        """Raises `NotServedError`, `RefusedError`."""
        asking = asyncio.create_task(generate(self.session, host.url, request, self.call_timeout_s, received))
        missed = 0
        try:
            while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:
                status = self.view.values.get(host.host)
                missed = missed + 1 if status is None else 0
                if missed >= LOST_LOOKS or (status is not None and status.boot != host.boot):
                    raise NotServedError("it is lost: its heartbeat has ended")
            return asking.result()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    async def balance(self) -> None:
        """Take calls away from overloaded hosts when others have room, until cancelled."""
        while True:
            await asyncio.sleep(BALANCE_S)
            hosts = self.view.values
            for run in {run for requests in self._requests.values() for run in requests.values()}:
                given = surplus(self._open_to(run), run, self.in_flight)
                await asyncio.gather(*(self._recall(hosts[name], run, count) for name, count in given.items()))

    async def _recall(self, host: HostStatus, run: str, count: int) -> None:
        """The newest calls go: they have the fewest tokens to be read again."""
        ours = [name for name, of in self._requests.get(host.host, {}).items() if of == run]
        count -= sum(name in self._recalled for name in ours)
        chosen = [name for name in reversed(ours) if name not in self._recalled][: max(0, count)]
        if not chosen:
            return
        self._recalled.update(chosen)
        log.info("host %s is asked for %d calls: it has %d", host.host, len(chosen), len(ours))
        try:
            await recall(self.session, host.url, chosen, RECALL_S)
        except NotServedError as error:
            log.info("host %s keeps %d calls: %s", host.host, len(chosen), error)
            self._recalled.difference_update(chosen)

    async def _place(self, call: Generation, prefer: str | None, parking: Parking) -> tuple[HostStatus, float]:
        """A host, with a place on it taken; and how long the call was parked."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        placed: str | None = None
        try:
            async with _parked(parking) as parked:
                while True:
                    avoided = self._avoids(loop.time())
                    choice = choose(self._open_to(call.run), call.run, self.in_flight, avoided, prefer)
                    if choice.host is not None:
                        placed = choice.host.host
                        self.in_flight[placed] += 1
                        return choice.host, loop.time() - since if parked.now else 0.0
                    what = "room at a host" if choice.serving else "a host in the rollout role"
                    if not choice.serving and not parked.now and loop.time() - since >= SETTLE_S:
                        await parked.begin(since)
                        continue
                    bound = LOOK_S if choice.serving or parked.now else SETTLE_S
                    with self.waits.on(what, bound):
                        await self._change(bound, room=choice.serving)
        except BaseException:
            if placed is not None:  # it could not be recorded that the call goes on
                self._free(placed)
            raise

    def _open_to(self, run: str) -> list[HostStatus]:
        """Hosts that the run does not refuse."""
        spec = self.runs.values.get(run)
        return [host for host in self.view.values.values() if spec is None or refusal(spec, host) is None]

    async def _change(self, bound: float, *, room: bool) -> None:
        if not room:
            await self.view.changed(bound)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound):
                await self._freed.wait()

    def _free(self, host: str) -> None:
        self.in_flight[host] -= 1
        self._freed.set()
        self._freed = asyncio.Event()

    def _avoid(self, host: str) -> None:
        self._avoided[host] = (self.view.revisions.get(host, 0), asyncio.get_running_loop().time())

    def _avoids(self, now: float) -> set[str]:
        for host, (revision, since) in list(self._avoided.items()):
            if now - since >= AVOID_S or self.view.revisions.get(host, 0) != revision:
                del self._avoided[host]
        return set(self._avoided)


def _left(params: SamplingParams, tokens: int) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=tokens)


@dataclass
class _Parked:
    parking: Parking
    since: float | None = None

    @property
    def now(self) -> bool:
        return self.since is not None

    async def begin(self, since: float) -> None:
        self.since = since
        await self.parking.park()


@contextlib.asynccontextmanager
async def _parked(parking: Parking) -> AsyncIterator[_Parked]:
    parked = _Parked(parking)
    try:
        yield parked
    except BaseException:
        if parked.now:
            parking.forsake()
        raise
    if parked.since is not None:
        await parking.unpark(asyncio.get_running_loop().time() - parked.since)
