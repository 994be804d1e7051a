"""Streams: the events of an answer as its calls go on, ended by what is recorded of them.

Invariants: the text of a choice's events is that of its recorded call; the event that ends a choice follows its record;
a stream whose call ends without a record ends with an error of the API.

Awaits: woken by each increment of the calls and by their ends; meanwhile the client is told every `KEEP_ALIVE_S` that
it waits.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from opengyre.proto.traj import Call
from opengyre.rollout.ask import ApiError, Ask
from opengyre.rollout.live import Live
from opengyre.rollout.openai import Head, Heard, Stream
from opengyre.rollout.prompt import Renderer
from opengyre.rollout.recorder import Recorder, outcome
from opengyre.rollout.speech import Speech

KEEP_ALIVE_S = 3.0
"""A stream that has nothing to say says so, so that clients do not give up."""
WITHHELD_S = 120.0
"""How late an answer that is not live begins, if its calls take longer; clients wait for it some ten minutes."""


def token_texts(renderer: Renderer, tokens: Sequence[int], logprobs: Sequence[float]) -> Heard:
    """The text of each token, and its log-prob."""
    return [(renderer.decode([token]), logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


@dataclass
class _Teller:
    """One choice of a stream."""

    index: int
    choice: Call | Live
    stream: Stream
    renderer: Renderer
    ask: Ask
    live: bool
    call: Call | None = None
    _begun: bool = False
    _taken: int = 0
    _heard: int = 0
    _speech: Speech = field(init=False)

    def __post_init__(self) -> None:
        opening = self.choice.opening if isinstance(self.choice, Live) else ()
        self._speech = Speech(self.ask, self.renderer, opening)

    def go_on(self) -> Iterator[bytes]:
        """What is new; raises `ApiError` for a call that ended without a record."""
        if self.call is not None:
            return
        if not self._begun:
            self._begun = True
            yield self.stream.begin(self.index)
        if isinstance(self.choice, Call) or self.choice.task_of.done():
            call = outcome(self.choice)
            if rest := self._speech.rest(call):
                yield self.stream.say(self.index, rest, self._new(call.sampled_ids, call.logprobs))
            yield from self.stream.end(self.index, call, self._new(call.sampled_ids, call.logprobs) or None)
            self.call = call
        elif self.live and self._taken < len(self.choice.tokens):
            text = self._speech.take(self.choice.tokens[self._taken :])
            self._taken = len(self.choice.tokens)
            # After a stop string nothing is sure to be kept.
            heard = None if self._speech.over else self._new(self.choice.tokens, self.choice.logprobs)
            if text or heard:
                yield self.stream.say(self.index, text, heard)

    def _new(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Heard | None:
        if not self.ask.logprobs:
            return None
        begin, self._heard = self._heard, len(tokens)
        return token_texts(self.renderer, tokens[begin:], logprobs[begin:])


def head_of(recorder: Recorder, choices: Sequence[Call | Live]) -> Head:
    first = choices[0]
    prompt = first.prompt_tokens if isinstance(first, Live) else first.prefix_tokens + len(first.prompt_ids)
    return Head(f"{recorder.dispatch.execution}-{first.call}", recorder.dispatch.run, prompt)


async def first_news(choices: Sequence[Call | Live], *, live: bool) -> None:
    """Wait until there is something to say, for a bounded time; raises `ApiError` for a call that failed.

    A client repeats a request that is lost before its answer begins, and gives up on one that breaks off later. So an
    answer that is not live begins late.
    """
    news = asyncio.Event()

    def there() -> bool:
        return any(isinstance(choice, Call) or choice.task_of.done() or (live and choice.tokens) for choice in choices)

    with _listening(choices, news), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KEEP_ALIVE_S if live else WITHHELD_S):
            while not there():
                news.clear()
                await news.wait()
    for choice in choices:
        if isinstance(choice, Live) and choice.task_of.done():
            outcome(choice)


async def events(
    recorder: Recorder,
    ask: Ask,
    choices: Sequence[Call | Live],
    stream: Stream,
    waiting: bytes,
    failed: Callable[[ApiError], Iterator[bytes]],
) -> AsyncIterator[bytes]:
    """The stream of a request whose calls are recorded or under way."""
    live = recorder.dispatch.harness.streams == "live"
    tellers = [_Teller(index, choice, stream, recorder.renderer, ask, live) for index, choice in enumerate(choices)]
    news = asyncio.Event()
    with _listening(choices, news):
        while True:
            news.clear()
            said: list[bytes] = []
            error: ApiError | None = None
            try:
                for teller in tellers:
                    said.extend(teller.go_on())
            except ApiError as refused:
                error = refused
            ended = [teller.call for teller in tellers if teller.call is not None]
            if error is not None:
                said.extend(failed(error))
            elif len(ended) == len(tellers):
                said.extend(stream.close(ended))
            if said:
                yield b"".join(said)
            if error is not None or len(ended) == len(tellers):
                return
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await news.wait()
            except TimeoutError:
                yield waiting


@contextlib.contextmanager
def _listening(choices: Sequence[Call | Live], news: asyncio.Event) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for choice in choices:
            if isinstance(choice, Live):
                stack.enter_context(choice.listening(news))
        yield
