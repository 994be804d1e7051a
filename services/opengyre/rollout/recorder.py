"""One execution's endpoint: a chat request in, a recorded call out.

Invariants:
- A call is in the log before its answer leaves.
- The same request is one call: a client that repeats it joins the one under way or gets the recorded answer.
- A call's seed is a function of the execution's seed and the call's number, so that a call that is asked for again
  by another writer samples the same tokens.

Awaits: `answer` is woken by the completion and its append; a client that goes away does not stop the call. `close` ends
the calls under way.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import AnyTrajEvent, Call, Resumed, Suspended
from opengyre.rollout.budget import TimeBudget
from opengyre.rollout.engine import RefusedError, SamplingParams
from opengyre.rollout.history import History
from opengyre.rollout.messages import answer, digest_of, extend
from opengyre.rollout.openai import ApiError, ChatRequest, budget_spent, context_exceeded, parse
from opengyre.rollout.prompt import Prompt, Renderer, build
from opengyre.rollout.router import Completion, Generation, Router
from opengyre.rollout.shell import turn_budget
from opengyre.shared import metrics
from opengyre.shared.bus import FencedError

MAX_CALLS = 64
"""Calls under way of one execution."""


class Record(Protocol):
    """Store an event in the execution's log and take it into its state."""

    def __call__(self, kind: Callable[..., AnyTrajEvent], /, **fields: Any) -> Awaitable[AnyTrajEvent]: ...


def call_seed(execution_seed: int, number: int) -> int:
    """63 bits."""
    digest = hashlib.sha256(f"{execution_seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass
class Recorder:
    dispatch: EpisodeDispatch
    attempt: int
    history: History
    renderer: Renderer
    router: Router
    record: Record
    budget: TimeBudget
    _under_way: dict[str, "asyncio.Task[Call]"] = field(default_factory=dict)
    _parked: int = 0
    _suspended: bool = False
    _parking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: bool = False
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = max((call.turn + 1 for call in self.history.calls), default=0)

    @property
    def suspended(self) -> bool:
        return self._suspended

    async def answer(self, body: bytes) -> tuple[Call, ChatRequest]:
        """Answer a request; raises `ApiError`."""
        request = parse(body)
        digest = digest_of(body)
        recorded = self.history.answered(digest)
        if recorded is not None:
            return recorded, request
        task = self._under_way.get(digest)
        if task is None:
            task = self._begin(digest, request)
        # Shielded: a client that went away may come back for the answer.
        try:
            return await asyncio.shield(task), request
        except asyncio.CancelledError:
            if task.cancelled():
                raise ApiError(503, "This execution has moved or ended.", kind="server_error", retry=True) from None
            raise
        except FencedError as error:
            raise ApiError(503, "This execution has moved.", kind="server_error", retry=True) from error

    def _begin(self, digest: str, request: ChatRequest) -> "asyncio.Task[Call]":
        if self._closed:
            raise ApiError(503, "This execution has ended.", kind="server_error")
        if len(self.history.calls) + len(self._under_way) >= turn_budget(self.dispatch):
            raise budget_spent("turn budget")
        if len(self._under_way) >= MAX_CALLS:
            raise ApiError(429, f"{MAX_CALLS} calls are under way; wait for one.", kind="rate_limit_error", retry=True)
        prompt = self._prompt(request)
        task = asyncio.create_task(self._call(self._next, digest, request, prompt))
        self._next += 1
        self._under_way[digest] = task
        task.add_done_callback(lambda done: self._end(digest, done))
        return task

    def _end(self, digest: str, task: "asyncio.Task[Call]") -> None:
        self._under_way.pop(digest, None)
        if not task.cancelled():
            task.exception()

    def _prompt(self, request: ChatRequest) -> Prompt:
        try:
            prompt = build(request.messages, self.history, self.renderer)
        except ValueError as error:
            raise ApiError(400, f"{error}.", param="messages") from error
        limit = self.dispatch.harness.context_tokens
        if len(prompt.tokens) >= limit:
            raise context_exceeded(len(prompt.tokens), limit)
        return prompt

    async def _call(self, number: int, digest: str, request: ChatRequest, prompt: Prompt) -> Call:
        loop = asyncio.get_running_loop()
        since = loop.time()
        harness = self.dispatch.harness
        # A load has the drawn length, whatever the policy would say.
        load = harness.agent == "synthetic"
        room = min(harness.max_tokens, harness.context_tokens - len(prompt.tokens))
        generation = Generation(
            request=f"{self.dispatch.execution}-a{self.attempt}-c{number}",
            run=self.dispatch.run,
            tokens=prompt.tokens,
            params=SamplingParams(
                max_tokens=min(room, request.wished_tokens or room),
                temperature=harness.temperature,
                seed=call_seed(self.dispatch.seed, number),
                stop_token_ids=() if load else tuple(self.renderer.stop_token_ids),
                ignore_eos=load,
            ),
            prefer=prompt.host,
        )
        try:
            done = await self.router.complete(generation, self)
        except RefusedError as error:
            if error.code == "context_length_exceeded":
                raise context_exceeded(len(prompt.tokens), harness.context_tokens) from error
            raise ApiError(400, f"The model's host refuses the request: {error}") from error
        return await self._store(number, digest, prompt, done, loop.time() - since)

    async def _store(self, number: int, digest: str, prompt: Prompt, done: Completion, duration_s: float) -> Call:
        assert done.finish != "abort"
        text = self.renderer.completion_text(done.tokens)
        stored = await self.record(
            Call,
            call=f"c{number:04d}",
            turn=number,
            request_digest=digest,
            parent=prompt.parent,
            prefix_tokens=prompt.prefix,
            prompt_ids=prompt.tokens[prompt.prefix :],
            sampled_ids=done.tokens,
            logprobs=done.logprobs,
            versions=done.versions,
            temperature=self.dispatch.harness.temperature,
            finish_reason=done.finish,
            text=text,
            hosts=done.hosts,
            parked_s=done.parked_s,
            moves_s=done.moves_s,
            duration_s=duration_s,
            history_digest=extend(prompt.digest, answer(text)),
        )
        assert isinstance(stored, Call)
        return stored

    def token_texts(self, call: Call) -> list[str]:
        """The text of each sampled token."""
        return [self.renderer.decode([token]) for token in call.sampled_ids]

    async def park(self) -> None:
        """The first parked call suspends the episode."""
        self._parked += 1
        self.budget.pause()
        async with self._parking:
            if not self._suspended and self._parked:
                self._suspended = True
                metrics.SUSPENDED_EPISODES.inc()
                await self.record(Suspended, turn=len(self.history.calls))

    async def unpark(self, waited_s: float) -> None:
        """The last parked call that goes on resumes it."""
        self.forsake()
        async with self._parking:
            if self._suspended and not self._parked:
                self._suspended = False
                metrics.SUSPENDED_EPISODES.dec()
                await self.record(Resumed, turn=len(self.history.calls), waited_s=waited_s)

    def forsake(self) -> None:
        self._parked -= 1
        self.budget.resume()

    async def close(self) -> None:
        """Stop the calls under way and take no more."""
        self._closed = True
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._suspended:
            self._suspended = False
            metrics.SUSPENDED_EPISODES.dec()
