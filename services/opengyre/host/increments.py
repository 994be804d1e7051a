"""An answer in increments: server-sent events in the shape of vLLM's, as the engine samples.

Each event holds the tokens that are new, their log-probs and the spans of the weight versions that sampled them, in
positions of the whole completion, so that whoever has a beginning of the events has a beginning of the completion. The
last one has the finish reason (`abort` for a call that was stopped), and `[DONE]` follows it. Where the engine fails,
an event with an error ends the stream instead.

Invariants: the place behind the door is left before the last event is sent, and in any case when the response ends;
there is at most one event an interval.

Awaits: woken by the engine's answer, the client's going, the end of the interval; `bound_s` after the beginning the
call is stopped. A client that takes nothing for `SEND_S` is gone.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from opengyre.host.engine import Engine
from opengyre.tiny.types import EngineError, FinishReason, GenerateResult, InvalidRequestError, VersionSpan, spans_from

SEND_S = 10.0
_encoder = msgspec.json.Encoder()


def choice_of(
    tokens: Sequence[int], logprobs: Sequence[float], spans: Sequence[VersionSpan], finish: FinishReason | None
) -> dict[str, Any]:
    """The `choices[0]` of an answer or of an event."""
    pairs = zip(tokens, logprobs, strict=True)
    return {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]},
        "finish_reason": finish,
        "weight_versions": [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans],
    }


class Increments(Response):
    """`place` is closed when the call is over; `ended` is told its result and says how long the engine had it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        engine: Engine,
        engine_id: str,
        answer: "asyncio.Future[GenerateResult]",
        gone: "asyncio.Future[None]",
        interval_s: float,
        bound_s: float,
        ended: Callable[[GenerateResult], float],
        place: contextlib.ExitStack,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        # The length is known to nobody yet.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._request_id = request_id
        self._engine = engine
        self._engine_id = engine_id
        self._answer = answer
        self._gone = gone
        self._interval_s = interval_s
        self._bound_s = bound_s
        self._ended = ended
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        with self._place:
            begun = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            try:
                async with asyncio.timeout(SEND_S):
                    await send(begun)
                sent = await self._go_on(send)
            except TimeoutError:
                return
            if sent is None:
                return
            last = self._last(sent)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _go_on(self, send: Send) -> int | None:
        """Send what is sampled until the answer is whole: the number of tokens that were sent. None: nobody listens.

        Raises `TimeoutError` where the client takes nothing.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._bound_s
        sent = 0
        while True:
            done, _ = await asyncio.wait(
                {self._answer, self._gone}, timeout=self._interval_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._answer in done:
                return sent
            if done:
                return None
            new = self._engine.sampled(self._engine_id, sent)
            if new.token_ids:
                choice = choice_of(new.token_ids, new.logprobs, new.weight_versions, None)
                event = _event({"request_id": self._request_id, "choices": [choice]})
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                sent += len(new.token_ids)
            if loop.time() >= until:
                await self._engine.abort([self._engine_id])

    def _last(self, sent: int) -> bytes:
        try:
            result = self._answer.result()
        except InvalidRequestError as error:  # it is so at every host
            return _event({"error": {"message": str(error), "type": "invalid_request", "param": None, "code": 400}})
        except EngineError as error:
            return _event({"error": {"message": str(error), "type": "engine_failed", "param": None, "code": 503}})
        count = len(result.token_ids)
        spans = spans_from(result.weight_versions, sent, count)
        choice = choice_of(result.token_ids[sent:], result.logprobs[sent:], spans, result.finish_reason)
        engine_s = self._ended(result)
        event = _event({"request_id": self._request_id, "engine_s": engine_s, "choices": [choice]})
        return event + b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(document) + b"\n\n"
