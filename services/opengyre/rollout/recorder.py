"""One execution's endpoint: a request in, recorded calls out, one for each choice.

Invariants:
- A call is in the log before the end of its answer leaves; a client that streams gets what is sure of it before.
- The same request is the same calls: a client that repeats it joins those under way or gets the recorded answers.
- A call's seed is a function of the execution's seed and the call's number, so that a call that is asked for again
  by another writer samples the same tokens.
- An execution samples no more than its token budget: calls under way hold what they may still sample.
- New calls of an execution begin in the order of their requests.
- No execution waits for another's prompt: a long one is encoded in a thread, one at a time for an execution, and one
  that is sure to be too long is not encoded.

Awaits: `begin` and `count` are woken by the thread that encodes, or by the end of the encoding before theirs; a request
that is cancelled meanwhile has begun nothing. `answer` is woken by the completions and their appends; a client that
goes away does not stop them. `close` ends the calls under way. `spent` is set when a budget first refuses a call.
"""

import asyncio
import hashlib
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import AnyTrajEvent, Call, EndReason, Resumed, Suspended, ToolCall
from opengyre.rollout.ask import ApiError, Ask, ContextExceededError, budget_spent, busy, moved
from opengyre.rollout.budget import TimeBudget
from opengyre.rollout.engine import RefusedError, SamplingParams
from opengyre.rollout.figures import TRANSITIONS
from opengyre.rollout.history import History, message_of_parts
from opengyre.rollout.live import Live
from opengyre.rollout.messages import extend
from opengyre.rollout.prompt import Prompt, Renderer, fewest_tokens, prompt_of, size_of
from opengyre.rollout.reading import ends_of, read
from opengyre.rollout.router import QUIET_S, Completion, Generation, Home, Router
from opengyre.rollout.shell import most_calls
from opengyre.rollout.spans import stage
from opengyre.rollout.speech import Watch
from opengyre.shared import metrics
from opengyre.shared.bus import FencedError

MAX_CALLS = 64
"""Calls under way of one execution."""
LIVE_S = 0.03
"""Between the increments of a call whose client streams, at least."""
LONG = 1 << 16
"""Characters of a request that are encoded beside the event loop; fewer take some milliseconds."""
INCREMENTS_PER_S = 1000.0
"""Of all calls of a replica together, so that streams leave it time for everything else."""

# Of its own, so that long prompts do not keep the default executor's threads from their work.
_encoding = ThreadPoolExecutor(2, "encode")


class Record(Protocol):
    """Store an event in the execution's log and take it into its state."""

    def __call__(self, kind: Callable[..., AnyTrajEvent], /, **fields: Any) -> Awaitable[AnyTrajEvent]: ...


def call_seed(execution_seed: int, number: int) -> int:
    """63 bits."""
    digest = hashlib.sha256(f"{execution_seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def outcome(choice: Call | Live) -> Call:
    """The recorded call, once it is there; raises `ApiError`."""
    if isinstance(choice, Call):
        return choice
    task = choice.task_of
    if task.cancelled():
        raise moved("This execution has moved or ended.")
    try:
        return task.result()
    except FencedError as error:
        raise moved("This execution has moved.") from error


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
    step: int = 0
    """Of a task of several steps: the same request in another step is another one."""
    earlier: int = 0
    """Calls of the steps before, which are not of this one's turn budget."""
    spent: asyncio.Event = field(default_factory=asyncio.Event)
    refused: EndReason | None = None
    """The budget that first refused a call."""
    _under_way: dict[tuple[str, int], Live] = field(default_factory=dict)
    _parked: int = 0
    _suspended: bool = False
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _parking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: bool = False
    _next: int = 0
    _home: Home = field(default_factory=Home)

    def __post_init__(self) -> None:
        if self.history.calls and self.history.calls[-1].hosts:
            self._home.host = self.history.calls[-1].hosts[-1]
        self._next = max((call.turn + 1 for call in self.history.calls), default=0)

    @property
    def suspended(self) -> bool:
        return self._suspended

    async def begin(self, ask: Ask) -> list[Call | Live]:
        """The recorded calls that answer a request, and those under way, in the order of its choices; raises
        `ApiError`."""
        if not self._new(ask):
            return self._choices(ask, None)
        async with self._beginning:
            self._missing(ask)
            with stage("render"):
                prompt = await self._prompt(ask) if self._new(ask) else None
            return self._choices(ask, prompt)

    def _choices(self, ask: Ask, prompt: Prompt | None) -> list[Call | Live]:
        """`prompt`: of those that are new."""
        missing = self._missing(ask)  # again: calls may have come or gone while the prompt was encoded
        if not missing:
            TRANSITIONS.labels("retry").inc()
        share = max(1, self._tokens_left() // max(1, len(missing)))
        found: list[Call | Live] = []
        for choice in range(ask.n):
            call = self.history.answered(ask.digest, choice)
            found.append(call if call is not None else self._choice(ask, choice, prompt, share))
        return found

    async def answer(self, ask: Ask) -> list[Call]:
        """The calls that answer a request, in the order of its choices; raises `ApiError`."""
        choices = await self.begin(ask)
        waiting = [choice.task_of for choice in choices if isinstance(choice, Live)]
        if waiting:
            # Not cancelled with us: a client that went away may come back for the answer.
            await asyncio.wait(waiting)
        return [outcome(choice) for choice in choices]

    async def count(self, ask: Ask) -> int:
        """Tokens of the request's prompt, also where they are too many; raises `ApiError`."""
        async with self._beginning:
            return len((await self._rendered(ask)).tokens)

    def _new(self, ask: Ask) -> int:
        """How many of the choices are neither recorded nor under way."""
        return sum(
            self.history.answered(ask.digest, choice) is None and (ask.digest, choice) not in self._under_way
            for choice in range(ask.n)
        )

    def _missing(self, ask: Ask) -> list[int]:
        """The choices that are not recorded; raises `ApiError` where those that are new may not be begun."""
        missing = [choice for choice in range(ask.n) if self.history.answered(ask.digest, choice) is None]
        new = self._new(ask)
        if not new:
            return missing
        if self._closed:
            raise ApiError(503, "This execution has ended.", kind="server_error")
        calls = len(self.history.calls) - self.earlier
        if calls + len(self._under_way) + new > most_calls(self.dispatch):
            self._refuse("turn_budget")
            raise budget_spent("turn_budget")
        if self._under_way and len(self._under_way) + new > MAX_CALLS:
            raise busy(f"{len(self._under_way)} calls are under way, allowed are {MAX_CALLS}; wait for one.")
        if self._tokens_left() < new:
            if self._under_way:
                raise busy("What is left of the token budget is held by the calls under way; wait for one.")
            self._refuse("token_budget")
            raise budget_spent("token_budget")
        return missing

    def _tokens_left(self) -> int:
        """Of the token budget, without what the calls under way may still sample."""
        limit = self.dispatch.harness.token_budget
        if limit is None:
            return sys.maxsize
        return limit - self.history.sampled - sum(live.most for live in self._under_way.values())

    def _refuse(self, reason: EndReason) -> None:
        self.refused = self.refused or reason
        self.spent.set()

    def _choice(self, ask: Ask, choice: int, prompt: Prompt | None, share: int) -> Live:
        key = (ask.digest, choice)
        live = self._under_way.get(key)
        if live is None:
            assert prompt is not None, "it is new"
            number = self._next
            live = Live(
                call=f"c{number:04d}",
                opening=prompt.tokens[len(prompt.tokens) - prompt.forced :],
                prompt_tokens=len(prompt.tokens),
                most=self._most(ask, prompt, share),
                watch=Watch(ends_of(ask, self.renderer), self.renderer.decode),
            )
            task = asyncio.create_task(self._call(number, ask, choice, prompt, live))
            self._next += 1
            self._under_way[key] = live
            live.begin(task)
            task.add_done_callback(lambda done: self._end(key, done))
        return live

    def _most(self, ask: Ask, prompt: Prompt, share: int) -> int:
        """Tokens that a call may sample; `share` is its part of the token budget."""
        harness = self.dispatch.harness
        room = min(harness.max_tokens, harness.context_tokens - len(prompt.tokens))
        return min(room, ask.max_tokens or room, share)

    def _end(self, key: tuple[str, int], task: "asyncio.Task[Call]") -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()

    async def _rendered(self, ask: Ask) -> Prompt:
        if ask.tokens is not None and not all(0 <= token < self.renderer.vocab_size for token in ask.tokens):
            most = self.renderer.vocab_size - 1
            raise ApiError(400, f"prompt has a token id that is no token; allowed are 0 to {most}.", param="prompt")
        try:
            if size_of(ask) < LONG:
                return prompt_of(ask, self.history.line(ask.lane), self.renderer)
            loop = asyncio.get_running_loop()
            line = self.history.line(ask.lane).snapshot()
            return await loop.run_in_executor(_encoding, prompt_of, ask, line, self.renderer)
        except ValueError as error:
            raise ApiError(400, f"{error}.", param="messages") from error

    async def _prompt(self, ask: Ask) -> Prompt:
        limit = self.dispatch.harness.context_tokens
        fewest = fewest_tokens(ask, self.renderer)
        if fewest >= limit:
            self.refused = self.refused or "overflow"
            raise ContextExceededError(fewest, limit, least=True)
        prompt = await self._rendered(ask)
        if len(prompt.tokens) >= limit:
            self.refused = self.refused or "overflow"
            raise ContextExceededError(len(prompt.tokens), limit)
        return prompt

    async def _call(self, number: int, ask: Ask, choice: int, prompt: Prompt, live: Live) -> Call:
        if self.before_call is not None:
            await self.before_call(number)
        loop = asyncio.get_running_loop()
        since = loop.time()
        harness = self.dispatch.harness
        # A load has the drawn length, whatever the policy would say.
        load = harness.agent == "synthetic"
        watched = ask.stream or bool(ends_of(ask, self.renderer))
        generation = Generation(
            request=f"{self.dispatch.execution}-a{self.attempt}-c{number}",
            run=self.dispatch.run,
            tokens=prompt.tokens,
            params=SamplingParams(
                max_tokens=live.most,
                temperature=harness.temperature,
                seed=call_seed(self.dispatch.seed, number),
                stop_token_ids=() if load else tuple(self.renderer.stop_token_ids),
                ignore_eos=load,
            ),
            prefer=prompt.host,
            home=self._home,
            interval_s=self._interval_s(ask),
            hear=live.hear if watched else None,
        )
        try:
            done = await self.router.complete(generation, self)
        except RefusedError as error:
            if error.code == "context_length_exceeded":
                raise ContextExceededError(len(prompt.tokens), harness.context_tokens) from error
            raise ApiError(400, f"The model's host refuses the request: {error}") from error
        return await self._store(number, ask, choice, prompt, done, loop.time() - since)

    def _interval_s(self, ask: Ask) -> float:
        if ask.stream and self.dispatch.harness.streams == "live":
            return min(QUIET_S, max(LIVE_S, self.router.calls_in_flight / INCREMENTS_PER_S))
        return QUIET_S

    async def _store(
        self, number: int, ask: Ask, choice: int, prompt: Prompt, whole: Completion, duration_s: float
    ) -> Call:
        assert whole.finish != "abort"
        with stage("read"):
            fields = self._fields(number, ask, choice, prompt, whole, duration_s)
        with stage("append"):
            stored = await self.record(Call, **fields)
        # Its tokens and its turn are in the history from here on: who asks before its task is over counts them once.
        self._under_way.pop((ask.digest, choice), None)
        assert isinstance(stored, Call)
        TRANSITIONS.labels(prompt.transition).inc()
        return stored

    def _fields(
        self, number: int, ask: Ask, choice: int, prompt: Prompt, whole: Completion, duration_s: float
    ) -> dict[str, Any]:
        """Of the recorded call."""
        name = f"c{number:04d}"
        said = read(ask, whole, prompt.tokens[len(prompt.tokens) - prompt.forced :], self.renderer)
        done, text, content = said.kept, said.text, said.content
        calls = tuple(
            ToolCall(id=f"call_{name}_{place}", name=function, arguments=arguments)
            for place, (function, arguments) in enumerate(said.calls)
        )
        return {
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
            "stop": said.stop,
            "transition": prompt.transition,
            "forced": prompt.forced,
            "lane": ask.lane,
        }

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
        tasks = [live.task_of for live in self._under_way.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._suspended:
            self._suspended = False
            metrics.SUSPENDED_EPISODES.dec()
