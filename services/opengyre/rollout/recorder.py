"""One execution's endpoint: a request in, recorded calls out, one for each choice.

Invariants:
- A call is in the log before its answer leaves.
- The same request is the same calls: a client that repeats it joins those under way or gets the recorded answers.
- A call's seed is a function of the execution's seed and the call's number, so that a call that is asked for again
  by another writer samples the same tokens.

Awaits: `answer` is woken by the completions and their appends; a client that goes away does not stop them. `close` ends
the calls under way. `spent` is set when a budget first refuses a call.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import AnyTrajEvent, Call, EndReason, Resumed, Suspended, ToolCall
from opengyre.rollout.ask import ApiError, Ask, ContextExceededError, budget_spent, busy, moved
from opengyre.rollout.budget import TimeBudget
from opengyre.rollout.engine import RefusedError, SamplingParams
from opengyre.rollout.figures import TRANSITIONS
from opengyre.rollout.history import History, message_of_parts
from opengyre.rollout.messages import extend
from opengyre.rollout.prompt import Prompt, Renderer, prompt_of
from opengyre.rollout.router import Completion, Generation, Router
from opengyre.rollout.shell import turn_budget
from opengyre.rollout.stops import before, cut
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
    before_call: Callable[[int], Awaitable[None]] | None = None
    """Awaited with a new call's number before it is sampled: the agent waits meanwhile."""
    spent: asyncio.Event = field(default_factory=asyncio.Event)
    refused: EndReason | None = None
    """The budget that first refused a call."""
    _under_way: dict[tuple[str, int], "asyncio.Task[Call]"] = field(default_factory=dict)
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

    async def answer(self, ask: Ask) -> list[Call]:
        """The calls that answer a request, in the order of its choices; raises `ApiError`."""
        waiting = [self._choice(ask, choice) for choice in self._missing(ask)]
        if waiting:
            # Shielded: a client that went away may come back for the answer.
            joined = asyncio.gather(*(asyncio.shield(task) for task in waiting))
            try:
                await joined
            except asyncio.CancelledError:
                if any(task.cancelled() for task in waiting):
                    raise moved("This execution has moved or ended.") from None
                raise
            except FencedError as error:
                raise moved("This execution has moved.") from error
        else:
            TRANSITIONS.labels("retry").inc()
        calls = [self.history.answered(ask.digest, choice) for choice in range(ask.n)]
        return [call for call in calls if call is not None]

    def count(self, ask: Ask) -> int:
        """Tokens of the request's prompt, also where they are too many; raises `ApiError`."""
        return len(self._rendered(ask).tokens)

    def _missing(self, ask: Ask) -> list[int]:
        """The choices that are not recorded; raises `ApiError` where those that are new may not be begun."""
        missing = [choice for choice in range(ask.n) if self.history.answered(ask.digest, choice) is None]
        new = sum((ask.digest, choice) not in self._under_way for choice in missing)
        if not new:
            return missing
        if self._closed:
            raise ApiError(503, "This execution has ended.", kind="server_error")
        if len(self.history.calls) + len(self._under_way) + new > turn_budget(self.dispatch):
            self._refuse("turn_budget")
            raise budget_spent("turn budget")
        if self._under_way and len(self._under_way) + new > MAX_CALLS:
            raise busy(f"{len(self._under_way)} calls are under way, allowed are {MAX_CALLS}; wait for one.")
        return missing

    def _refuse(self, reason: EndReason) -> None:
        self.refused = self.refused or reason
        self.spent.set()

    def _choice(self, ask: Ask, choice: int) -> "asyncio.Task[Call]":
        key = (ask.digest, choice)
        task = self._under_way.get(key)
        if task is None:
            prompt = self._prompt(ask)
            task = asyncio.create_task(self._call(self._next, ask, choice, prompt))
            self._next += 1
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        return task

    def _end(self, key: tuple[str, int], task: "asyncio.Task[Call]") -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()

    def _rendered(self, ask: Ask) -> Prompt:
        if ask.tokens is not None and not all(0 <= token < self.renderer.vocab_size for token in ask.tokens):
            most = self.renderer.vocab_size - 1
            raise ApiError(400, f"prompt has a token id that is no token; allowed are 0 to {most}.", param="prompt")
        try:
            return prompt_of(ask, self.history, self.renderer)
        except ValueError as error:
            raise ApiError(400, f"{error}.", param="messages") from error

    def _prompt(self, ask: Ask) -> Prompt:
        prompt = self._rendered(ask)
        limit = self.dispatch.harness.context_tokens
        if len(prompt.tokens) >= limit:
            self.refused = self.refused or "overflow"
            raise ContextExceededError(len(prompt.tokens), limit)
        return prompt

    async def _call(self, number: int, ask: Ask, choice: int, prompt: Prompt) -> Call:
        if self.before_call is not None:
            await self.before_call(number)
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
                max_tokens=min(room, ask.max_tokens or room),
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
                raise ContextExceededError(len(prompt.tokens), harness.context_tokens) from error
            raise ApiError(400, f"The model's host refuses the request: {error}") from error
        return await self._store(number, ask, choice, prompt, done, loop.time() - since)

    async def _store(
        self, number: int, ask: Ask, choice: int, prompt: Prompt, whole: Completion, duration_s: float
    ) -> Call:
        assert whole.finish != "abort"
        name = f"c{number:04d}"
        done, stop = cut(whole, ask.stops, self.renderer.decode)
        content: str | None = None
        calls: tuple[ToolCall, ...] = ()
        if ask.api == "completions":
            text = before(self.renderer.decode(done.tokens), stop)
        elif stop is not None:
            text = before(self.renderer.decode(done.tokens), stop).strip()
        else:
            text = self.renderer.completion_text(done.tokens)
        if ask.calls and ask.tools and done.finish == "stop":
            said = self.renderer.read_turn(text, ask.tools)
            content = said.content if said.calls else None
            calls = tuple(
                ToolCall(id=f"call_{name}_{place}", name=function, arguments=arguments)
                for place, (function, arguments) in enumerate(said.calls)
            )
        fields: dict[str, Any] = {
            "call": name,
            "turn": number,
            "request_digest": ask.digest,
            "parent": prompt.parent,
            "prefix_tokens": prompt.prefix,
            "prompt_ids": prompt.tokens[prompt.prefix :],
            "sampled_ids": done.tokens,
            "logprobs": done.logprobs,
            "versions": done.versions,
            "temperature": self.dispatch.harness.temperature,
            "finish_reason": done.finish,
            "text": text,
            "hosts": done.hosts,
            "parked_s": done.parked_s,
            "moves_s": done.moves_s,
            "duration_s": duration_s,
            "history_digest": extend(prompt.digest, message_of_parts(text, content, calls)) if prompt.digest else "",
            "api": ask.api,
            "choice": choice,
            "choices": ask.n,
            "content": content,
            "tool_calls": calls,
            "stop": stop,
            "transition": prompt.transition,
        }
        stored = await self.record(Call, **fields)
        assert isinstance(stored, Call)
        TRANSITIONS.labels(prompt.transition).inc()
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
