"""vLLM behind the host's interface: a server of its own (`vllm_process`), spoken to over HTTP.

States: asleep (on a CPU: there is no server, since vLLM's CPU build frees nothing; on a GPU: it sleeps) -> paused ->
running, and back. `closed` once the server has ended by itself.

Invariants:
- A call's tokens come here while it is sampled, `host.vllm_stream_interval` at a time: a server that dies loses no more
  than the last few, which nobody has seen. Its calls end as stopped, with what they had.
- Weights change only while the engine is paused and its caches are cleared.
- New weights are proven before they serve: the version's canary (`opengyre.weights.canary`) is scored and compared with
  the trainer's log-probs. vLLM scores nothing while it is paused, so it goes on for that, and what calls in flight get
  meanwhile is held back. If the canary is off it is thrown away, those calls end as stopped, and the former weights are
  taken again, and proven as well. So no token of weights that were not proven leaves this module; an engine of which it
  is not known what it holds (a load that was cancelled) does not go on.
- A canary is in vLLM's queue before that goes on, at the head: calls that have all seats would not let it in.
- What the engine does not refuse but dies of (a token that is none, a prompt that is too long) is refused here.

Awaits: a call is woken by its stream, and bounded by its host; a command by the server's answer, `COMMAND_S` at most (a
load `host.vllm_start_s`, if that is more); `wake` by the server's start, `host.vllm_start_s` at most; `_watch` by the
server's end; `_measure` every `MEASURE_S`.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from opengyre.host.engine import WAITING_FACTOR, CallProgress
from opengyre.host.vllm_calls import ID_PREFIX, Sampling, body_of, prompt_logprobs, scoring_of
from opengyre.host.vllm_machine import free_memory, gpu_memory, gpus_of
from opengyre.host.vllm_metrics import RATE_S, Meter, read_figures
from opengyre.host.vllm_plan import Facts, Plan, facts_of, plan, same_shape
from opengyre.host.vllm_process import Server
from opengyre.policy.directory import check_directory
from opengyre.proto.host import Sampler
from opengyre.shared.settings import HostSettings
from opengyre.shared.vllm import VllmMissingError, interpreter
from opengyre.tiny.types import (
    EngineBusyError,
    EngineError,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Increment,
    InvalidRequestError,
    WrongStateError,
)
from opengyre.weights.canary import Canary, gap, read_canary

log = logging.getLogger("gyre.host.vllm")

COMMAND_S = 120.0
MEASURE_S = 1.0
PATIENCE_S = 900.0
REFUSED_S = 60.0
"""A version that was not proven is not taken again for so long: each time costs the calls in flight some tokens."""
SAMPLED = "/gyre/sampled"
"""Of `vllm_side.gyre_vllm_sampled`."""
CANARY_PRIORITY = -(1 << 20)
"""Before all calls."""
QUEUED_LOOK_S = 0.01
"""Between two looks whether a canary is in vLLM's queue."""


class VllmEngine:
    name = "vllm"
    takes_turns = True

    def __init__(self, settings: HostSettings) -> None:
        self.capacity: float = settings.capacity
        self._settings = settings
        self._cpu = gpus_of(os.environ) == 0
        self._session: aiohttp.ClientSession | None = None
        self._server: Server | None = None
        self._facts: Facts | None = None
        self._plan: Plan | None = None
        self._sampler: Sampler | None = None
        """Of the server that was started last."""
        self._state = "asleep"
        self._directory: Path | None = None
        self._version = -1
        self._canary: Canary | None = None
        """Of the weights that were proven last."""
        self._doubted = False
        """What vLLM holds was not proven ..."""
        self._closed_to_calls = False
        """... and is sampled from until it is paused."""
        self._proving: asyncio.Event | None = None
        """While a canary is scored; set when it is known what becomes of the calls."""
        self._refused: tuple[Path, float, str] | None = None
        self._calls: dict[str, Sampling] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._helpers: list[asyncio.Task[None]] = []
        self._scored = 0
        """Canaries."""
        self._tokens = 0
        self._rate: deque[tuple[float, int]] = deque()
        self._held = 0
        self._meter = Meter()

    # Calls.

    @property
    def load_bound_s(self) -> float:
        return self._settings.vllm_start_s if self._server is None else self._load_s

    @property
    def _load_s(self) -> float:
        """Bound of a load: it reads what a start reads."""
        return max(COMMAND_S, self._settings.vllm_start_s)

    def submit(self, request: GenerateRequest) -> "asyncio.Future[GenerateResult]":
        if (
            self._server is None
            or self._facts is None
            or self._plan is None
            or self._state not in ("running", "paused")
        ):
            raise WrongStateError(f"submit: the engine is {self._state}; it must be running or paused")
        most = self._facts.vocabulary - 1
        if not request.token_ids or not 0 <= min(request.token_ids) <= max(request.token_ids) <= most:
            raise InvalidRequestError(f"token_ids: allowed are one or more token ids from 0 to {most}")
        if len(request.token_ids) >= self._plan.context:
            raise InvalidRequestError(
                f"token_ids has {len(request.token_ids)} tokens; allowed are up to {self._plan.context - 1}"
            )
        if self._closed_to_calls:
            raise EngineBusyError("weights are taken back; try again later")
        if len(self._calls) >= (1 + WAITING_FACTOR) * self.capacity:
            raise EngineBusyError(f"{len(self._calls)} calls are in flight; try again later")
        call = Sampling(request, self._version)
        if self._proving is not None:
            call.hold()
        self._calls[request.request_id] = call
        task = asyncio.ensure_future(self._sample(call, self._server))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _sample(self, call: Sampling, server: Server) -> GenerateResult:
        assert self._plan is not None
        body = body_of(call.request, self._plan.context, call.version, self._settings.vllm_stream_interval)
        bound = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        failed: Exception | None = None
        try:
            try:
                async with self._http().post(f"{server.url}/inference/v1/generate", json=body, timeout=bound) as answer:
                    if answer.status != 200:
                        said = (await answer.text())[:300]
                        refused = InvalidRequestError if answer.status == 400 else EngineError
                        raise refused(f"vLLM answered {answer.status}: {said}")
                    async for line in answer.content:
                        self._count(call.take(line))
                        if call.withdrawn:
                            break
            except InvalidRequestError:
                raise
            except (aiohttp.ClientError, TimeoutError, EngineError) as error:
                # What it had sampled is here: the call ends as one that was stopped, and goes on elsewhere.
                log.warning("call %s ends with %d tokens: %r", call.request.request_id, len(call.tokens), error)
                failed = error
            while self._proving is not None:
                await self._proving.wait()
        finally:
            self._calls.pop(call.request.request_id, None)
        if failed is not None and not call.tokens:
            raise EngineError(f"the engine failed: {failed}") from failed
        return call.result()

    def _count(self, tokens: int) -> None:
        if tokens:
            self._tokens += tokens
            self._rate.append((time.monotonic(), tokens))

    async def abort(self, request_ids: Iterable[str] | None) -> int:
        chosen = list(self._calls) if request_ids is None else [name for name in request_ids if name in self._calls]
        if not chosen or self._server is None:
            return 0
        with contextlib.suppress(EngineError):  # a server that died has ended them all
            await self._post("/inference/v1/abort_requests", {"request_ids": [f"{ID_PREFIX}{name}" for name in chosen]})
        return len(chosen)

    def sampler(self) -> Sampler | None:
        return self._sampler

    def progress(self) -> Sequence[CallProgress]:
        return [
            CallProgress(name, len(call.request.token_ids), len(call.tokens), call.request.max_tokens)
            for name, call in self._calls.items()
        ]

    def sampled(self, request_id: str, after: int) -> Increment:
        call = self._calls.get(request_id)
        return Increment() if call is None else call.increment(after)

    # Weights and roles.

    async def pause(self) -> None:
        self._must("pause", "running", "paused")
        await self._pause()
        self._become("paused")

    async def _pause(self) -> None:
        # Calls in flight are computed anew under the weights that come: old keys and values would mix two policies.
        await self._post("/pause?mode=keep&clear_cache=true")

    async def resume(self) -> None:
        self._must("resume", "running", "paused")
        if self._doubted:
            raise WrongStateError("resume: the weights that vLLM holds were not proven")
        await self._go_on()
        self._become("running")

    async def _go_on(self) -> None:
        if any(call.version != self._version for call in self._calls.values()):
            sampled = await self._post(SAMPLED)
            for name, call in self._calls.items():
                call.changed(self._version, sampled.get(f"{ID_PREFIX}{name}", 0))
        await self._post("/resume")

    async def load(self, directory: Path, version: int) -> None:
        self._must("load", "paused")
        self._look_for_refusal(directory)
        facts = await asyncio.to_thread(facts_of, directory)
        canary = await asyncio.to_thread(read_canary, directory)
        assert self._facts is not None
        if not same_shape(facts, self._facts):
            raise InvalidRequestError(f"{directory} holds a model of another shape than the one that is served")
        before, named = self._directory, self._version
        assert before is not None
        try:
            await self._take(directory, version)
            await self._prove(directory, canary)
        except EngineError:
            self._closed_to_calls = True
            try:
                await self._put_back(before, named)
            finally:
                self._closed_to_calls = False
            raise

    async def _put_back(self, directory: Path, version: int) -> None:
        """The weights that were served before, proven again; without them the engine is of no use, and ends."""
        try:
            await self._pause()
            await self.abort([name for name, call in self._calls.items() if call.withdrawn])
            await self._take(directory, version)
            await self._prove(directory, self._canary)
        except EngineError:
            log.exception("the weights of %s cannot be taken again; vLLM is ended", directory)
            await self._end()
            self._state = "closed"

    async def _take(self, directory: Path, version: int) -> None:
        self._doubted = True
        answer = await self._post("/collective_rpc", {"method": "gyre_load", "args": [str(directory)]}, self._load_s)
        log.info("weights of %s taken: %s", directory, answer)
        await self._name(directory, version)

    async def _name(self, directory: Path, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version)})
        self._directory, self._version = directory, version

    def _look_for_refusal(self, directory: Path) -> None:
        if self._refused is not None and self._refused[0] == directory and time.monotonic() < self._refused[1]:
            raise EngineError(self._refused[2])

    async def _prove(self, directory: Path, canary: Canary | None) -> None:
        """From paused to paused: raises `EngineError` if vLLM does not compute what the trainer does."""
        if canary is None:  # of a directory that no trainer of ours wrote
            self._canary, self._doubted = None, False
            return
        assert self._plan is not None
        self._proving = asyncio.Event()
        for call in self._calls.values():
            call.hold()
        proven = False
        try:
            async with asyncio.timeout(COMMAND_S):
                scored = await self._score_first(canary.prompts)
            found = gap(canary, scored)
            log.info("log-probs of %s are off by %.2g nats, %.2g at most", directory, found.mean, found.largest)
            if not found.mean <= self._plan.canary_nats:
                why = (
                    f"log-probs of {directory}'s canary are off by {found.mean:.2g} nats on average; allowed are "
                    f"{self._plan.canary_nats:g} (host.vllm_canary_nats): vLLM does not compute by these weights"
                )
                self._refused = (directory, time.monotonic() + REFUSED_S, why)
                raise EngineError(why)
            # The caches are of these weights.
            await self._post("/pause?mode=keep&clear_cache=false")
            proven = True
            self._canary, self._doubted = canary, False
        except TimeoutError as error:
            raise EngineError(f"the canary of {directory} was not scored within {COMMAND_S:g} s") from error
        finally:
            for call in self._calls.values():
                call.proven() if proven else call.withdraw()
            proving, self._proving = self._proving, None
            proving.set()

    async def _score_first(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Have paused vLLM go on, with these before all calls."""
        self._scored += 1
        names = [f"canary-{self._scored}-{number}" for number in range(len(prompts))]
        asking = [asyncio.create_task(self.score(*one)) for one in zip(prompts, names, strict=True)]
        waiting = {f"{ID_PREFIX}{name}" for name in names}
        try:
            while not waiting <= (await self._post(SAMPLED)).keys():
                if (await asyncio.wait(asking, timeout=QUEUED_LOOK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    break  # it was answered, or refused
            await self._go_on()
            return list(await asyncio.gather(*asking))
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def score(self, token_ids: Sequence[int], request_id: str | None = None) -> list[float]:
        """Log-prob of each token but the first, given those before it, by the weights in force."""
        body = scoring_of(token_ids, request_id, CANARY_PRIORITY)
        return prompt_logprobs(await self._post("/inference/v1/generate", body), token_ids)

    async def sleep(self) -> None:
        if self._state == "asleep":
            return
        self._must("sleep", "running", "paused")
        if self._calls:
            raise WrongStateError(f"sleep: {len(self._calls)} calls are in flight")
        if self._cpu:
            await self._end()
        else:
            await self._post("/sleep?level=2&mode=keep")
            await self._look()
        self._become("asleep")

    async def wake(self, directory: Path, version: int) -> None:
        self._must("wake", "asleep")
        self._look_for_refusal(directory)
        await asyncio.to_thread(check_directory, directory)
        facts = await asyncio.to_thread(facts_of, directory)
        canary = await asyncio.to_thread(read_canary, directory)
        try:
            if self._server is not None and self._facts is not None and same_shape(facts, self._facts):
                await self._post("/wake_up", bound_s=self._load_s)
                await self._pause()
                await self._take(directory, version)
            else:
                await self._end()
                await self._start(facts)
                await self._ask_sampler()
                await self._pause()
                await self._name(directory, version)
            await self._prove(directory, canary)
            await self._look()
            self._become("paused")
        except EngineError:
            await self._end()
            raise

    async def _start(self, facts: Facts) -> None:
        try:
            python = interpreter(self._settings.vllm_python)
        except VllmMissingError as error:
            raise EngineError(str(error)) from error
        gpus = gpus_of(os.environ)
        free = await asyncio.to_thread(gpu_memory, python) if gpus else await asyncio.to_thread(free_memory)
        self._plan = plan(facts, self._settings, gpus=gpus, free_bytes=free)
        began = time.monotonic()
        self._server = await Server.start(
            python, self._plan.arguments, self._plan.environment, self._http(), self._settings.vllm_start_s
        )
        self._facts = facts
        log.info("vLLM serves %s after %.1f s", facts.directory, time.monotonic() - began)
        self._helpers = [
            asyncio.create_task(self._watch(self._server)), asyncio.create_task(self._measure(self._server))
        ]  # fmt: skip

    async def _ask_sampler(self) -> None:
        answer = await self._post("/collective_rpc", {"method": "gyre_sampler"})
        try:
            # What calls do not say (`body_of`) is of no account: this endpoint knows no defaults of the model's.
            self._sampler = msgspec.convert(answer["results"][0], Sampler)
        except (msgspec.ValidationError, LookupError) as error:
            raise EngineError(f"vLLM's worker says of its sampling what cannot be read: {error!r}") from error

    async def _end(self) -> None:
        for helper in self._helpers:
            helper.cancel()
        if self._helpers:
            await asyncio.wait(self._helpers)
        self._helpers = []
        self._meter.clear()
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
            self._held = await asyncio.to_thread(server.memory)

    async def _watch(self, server: Server) -> None:
        await server.gone()
        self._state = "closed"
        log.error("vLLM has ended by itself: %s", await server.last_words())

    async def _measure(self, server: Server) -> None:
        while True:
            try:
                await self._look()
                bound = aiohttp.ClientTimeout(total=5)
                async with self._http().get(f"{server.url}/metrics", timeout=bound, raise_for_status=True) as answer:
                    self._meter.take(read_figures(await answer.text()), time.monotonic())
            except (aiohttp.ClientError, TimeoutError, EngineError) as error:
                # What was read before grows old, and is then not believed.
                log.info("vLLM could not be measured: %r", error)
            await asyncio.sleep(MEASURE_S)

    async def _look(self) -> None:
        """What it holds: on a CPU its processes' memory, on a GPU what its workers say of theirs."""
        if self._server is None:
            return
        if self._cpu:
            self._held = await asyncio.to_thread(self._server.memory)
        else:
            answer = await self._post("/collective_rpc", {"method": "gyre_memory"})
            self._held = sum(int(one["allocated"]) for one in answer["results"])

    def stats(self) -> EngineStats:
        now = time.monotonic()
        while self._rate and now - self._rate[0][0] > RATE_S:
            self._rate.popleft()
        own = sum(tokens for _, tokens in self._rate) / RATE_S
        said = self._meter.tokens_per_s(now)
        figures = self._meter.now(now)
        calls = len(self._calls)
        running = calls if figures is None else min(calls, figures.running)
        weights = min(self._held, self._plan.weight_bytes) if self._plan is not None else 0
        return EngineStats(
            state=self._state,
            version=self._version,
            running=running,
            # Of what the page says: a call that came after it was made is none that waits.
            waiting=0 if figures is None else min(calls - running, figures.waiting),
            tokens=self._tokens,
            tokens_per_s=own if said is None else said,
            kv_bytes=self._held - weights,
            weight_bytes=weights,
            kv_usage=figures.kv_usage if figures is not None else 0.0,
            prefix_hits=self._meter.prefix_hits(now),
            preemptions=round(figures.preemptions) if figures is not None else 0,
        )

    async def close(self) -> None:
        self._state = "closed"
        for task in tuple(self._asking):
            task.cancel()
        if self._asking:
            await asyncio.wait(tuple(self._asking))
        await self._end()
        if self._session is not None:
            await self._session.close()

    # The server.

    def _must(self, what: str, *states: str) -> None:
        if self._state not in states:
            raise WrongStateError(f"{what}: the engine is {self._state}; it must be {' or '.join(states)}")

    def _become(self, state: str) -> None:
        """Raises `WrongStateError` where the server has ended by itself since it answered: that is not to be forgotten,
        as nobody looks for its end any more."""
        if self._state == "closed":
            raise WrongStateError("vLLM has ended by itself")
        self._state = state

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A call holds a connection for as long as it lasts, and commands must not wait for one.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def _post(self, path: str, body: object = None, bound_s: float = COMMAND_S) -> Any:
        if self._server is None:
            raise WrongStateError(f"{path}: vLLM does not run")
        bound = aiohttp.ClientTimeout(total=bound_s)
        try:
            async with self._http().post(f"{self._server.url}{path}", json=body, timeout=bound) as answer:
                if answer.status != 200:
                    raise EngineError(f"vLLM answered {answer.status} to {path}: {(await answer.text())[:300]}")
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"vLLM did not answer {path}: {error!r}") from error
