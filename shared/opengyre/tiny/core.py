"""The tiny engine without its thread: which requests run, what a step does, what a change of weights means for them.

States of a request: waiting (no slot) -> running (in a slot; `cached` counts the leading tokens whose keys and values
are in the cache) -> finished. A running request whose cache lacks more than its last token is prefilled; new weights
set `cached` to 0. While anything is to be prefilled a step prefills, up to one row a token and the prompts of many
requests at once; otherwise it samples a token for every running request.

Nothing here waits, reads a clock or is thread-safe.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from opengyre.tiny.config import TinyConfig
from opengyre.tiny.kernel import Cache, Kernel, Weights
from opengyre.tiny.sampling import choose, uniform
from opengyre.tiny.types import (
    EngineBusyError,
    EngineSettings,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Increment,
    InvalidRequestError,
    VersionSpan,
    spans_from,
)


@dataclass(slots=True)
class _Live:
    """A request in flight. `tokens` is its prompt and what was sampled."""

    request: GenerateRequest
    deliver: Callable[[GenerateResult], None]
    tokens: list[int]
    slot: int = -1
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def take(self, token: int, logprob: float, version: int) -> None:
        at = len(self.logprobs)
        self.tokens.append(token)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = self.versions[-1]._replace(end=at + 1)
        else:
            self.versions.append(VersionSpan(version, at, at + 1))
        # Last: what is beside this thread goes by the number of log-probs, and finds all else of such a token.
        self.logprobs.append(logprob)

    def since(self, after: int) -> Increment:
        """What was sampled beyond the first `after` tokens."""
        count = len(self.logprobs)
        begin = len(self.request.token_ids)
        return Increment(
            tuple(self.tokens[begin + after : begin + count]),
            tuple(self.logprobs[after:count]),
            spans_from(tuple(self.versions), after, count),
        )

    def result(self, reason: FinishReason) -> GenerateResult:
        sampled = tuple(self.tokens[len(self.request.token_ids) :])
        return GenerateResult(sampled, tuple(self.logprobs), reason, tuple(self.versions))


class Core:
    """Continuous batching over a fixed number of slots."""

    def __init__(self, config: TinyConfig, settings: EngineSettings) -> None:
        self.config = config
        self.settings = settings
        self.context = min(settings.max_context, config.max_position_embeddings)
        self.kernel = Kernel(config, settings.max_batch, self.context)
        self.weights: Weights | None = None
        self.cache: Cache | None = None
        self.version = -1
        self.tokens = 0
        self._waiting: deque[_Live] = deque()
        self._slots: list[_Live | None] = [None] * settings.max_batch
        self._lives: dict[str, _Live] = {}

    @property
    def running(self) -> int:
        return sum(live is not None for live in self._slots)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return len(self._lives)

    def progress(self) -> list[tuple[str, int, int, int]]:
        """Id, prompt, sampled and limit of each request; may be called beside a step, by any thread."""
        lives = (*tuple(self._slots), *tuple(self._waiting))  # each copied whole, while nothing else runs
        return [
            (live.request.request_id, len(live.request.token_ids), len(live.logprobs), live.request.max_tokens)
            for live in lives
            if live is not None
        ]

    def sampled(self, request_id: str, after: int) -> Increment:
        """What a request in flight has beyond its first `after` tokens; may be called beside a step, by any thread."""
        live = self._lives.get(request_id)
        return live.since(after) if live is not None else Increment()

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequestError` if the request can never be served here."""
        vocab = self.config.vocab_size
        if not request.token_ids:
            raise InvalidRequestError("token_ids is empty; a prompt has at least one token")
        if not all(0 <= token < vocab for token in request.token_ids):
            raise InvalidRequestError(f"token_ids holds a token outside the vocabulary; allowed are 0 to {vocab - 1}")
        if len(request.token_ids) >= self.context:
            raise InvalidRequestError(
                f"token_ids holds {len(request.token_ids)} tokens; the context of {self.context} allows a prompt of "
                f"{self.context - 1}"
            )
        if request.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {request.max_tokens}; allowed are values from 1")
        if not 0 <= request.temperature <= 100:
            raise InvalidRequestError(f"temperature is {request.temperature}; allowed are values from 0 to 100")

    def add(self, request: GenerateRequest, deliver: Callable[[GenerateResult], None]) -> None:
        """Queue a request; `deliver` is called once, with its result."""
        self.check(request)
        if request.request_id in self._lives:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in flight; it must be unique")
        if len(self._waiting) >= self.settings.max_waiting + self._slots.count(None):
            raise EngineBusyError(f"{len(self._waiting)} requests wait; max_waiting is {self.settings.max_waiting}")
        live = _Live(request, deliver, list(request.token_ids))
        self._lives[request.request_id] = live
        # They wait in order of priority, so those that go before it are the first ones.
        self._waiting.insert(sum(other.request.priority <= request.priority for other in self._waiting), live)

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """End these requests, or all, with what they have; unknown ids are passed over. Returns how many ended."""
        wanted = None if request_ids is None else set(request_ids)
        lives = [live for live in (*self._slots, *self._waiting) if live is not None]
        ended = [live for live in lives if wanted is None or live.request.request_id in wanted]
        for live in ended:
            self._finish(live, "abort")
        return len(ended)

    def set_weights(self, weights: Weights, version: int) -> None:
        """Use these weights from the next token on; requests in flight are prefilled again under them."""
        self.weights, self.version = weights, version
        if self.cache is not None:
            # What is masked is multiplied by 0, so a not-a-number of former weights must not stay.
            self.cache.clear()
        for live in self._slots:
            if live is not None:
                live.cached = 0

    def allocate(self) -> None:
        """Hold a cache."""
        self.cache = Cache(self.config, self.settings.max_batch, self.context)

    def free(self) -> None:
        """Hold neither cache nor weights. There must be no request in flight."""
        assert not self._lives, "requests in flight need their cache"
        self.cache = None
        self.weights = None

    def _finish(self, live: _Live, reason: FinishReason) -> None:
        if live.slot >= 0:
            self._slots[live.slot] = None
        else:
            self._waiting.remove(live)
        self._lives.pop(live.request.request_id, None)
        live.deliver(live.result(reason))

    def _admit(self) -> None:
        for slot, taken in enumerate(self._slots):
            if taken is None and self._waiting:
                live = self._waiting.popleft()
                live.slot = slot
                self._slots[slot] = live

    def step(self) -> int:
        """Prefill or sample once; returns how many tokens were sampled. Needs weights and a cache."""
        self._admit()
        running = [live for live in self._slots if live is not None]
        if not running:
            return 0
        if any(live.cached < len(live.tokens) - 1 for live in running):
            return self._prefill([live for live in running if live.cached < len(live.tokens)])
        return self._decode(running)

    def _prefill(self, lives: list[_Live]) -> int:
        rows = self.kernel.rows
        plan: list[tuple[int, int, int]] = []
        last: list[tuple[int, _Live]] = []
        # Those that lack most go first: what lacks only its last token may as well wait for the common step.
        for live in sorted(lives, key=lambda live: live.cached - len(live.tokens)):
            begin = live.cached
            end = min(len(live.tokens), begin + rows - len(plan))
            plan.extend((live.tokens[at], live.slot, at) for at in range(begin, end))
            live.cached = end
            if end == len(live.tokens) and end > begin:
                last.append((len(plan) - 1, live))
            if len(plan) == rows:
                break
        plan.extend([(0, self.settings.max_batch, 0)] * (rows - len(plan)))
        tokens, slots, positions = (list(column) for column in zip(*plan, strict=True))
        return self._sample(tokens, slots, positions, last)

    def _decode(self, lives: list[_Live]) -> int:
        rows = self.kernel.rows
        tokens, positions = [0] * rows, [0] * rows
        for live in lives:
            tokens[live.slot] = live.tokens[-1]
            positions[live.slot] = len(live.tokens) - 1
            live.cached = len(live.tokens)
        return self._sample(tokens, None, positions, [(live.slot, live) for live in lives])

    def _sample(
        self, tokens: list[int], slots: list[int] | None, positions: list[int], last: list[tuple[int, _Live]]
    ) -> int:
        """Run the rows; `last` says which of them have a token to be sampled, and for which request."""
        assert self.weights is not None
        assert self.cache is not None
        with torch.inference_mode():
            logits = self.kernel.forward(self.weights, self.cache, tokens, slots, positions)
            if not last:
                return 0
            temperature, noise = [1.0] * self.kernel.rows, [0.0] * self.kernel.rows
            for row, live in last:
                temperature[row] = live.request.temperature
                noise[row] = uniform(live.request.seed, len(live.tokens))
            chosen, logprobs = choose(logits, temperature, noise)
        for row, live in last:
            live.take(chosen[row], logprobs[row], self.version)
            self._end(live)
        self.tokens += len(last)
        return len(last)

    def _end(self, live: _Live) -> None:
        request = live.request
        if live.tokens[-1] in request.stop_token_ids and not request.ignore_eos:
            self._finish(live, "stop")
        elif len(live.logprobs) >= request.max_tokens or len(live.tokens) >= self.context:
            self._finish(live, "length")
