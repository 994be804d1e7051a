"""The host's HTTP endpoint, in the shape of vLLM's own: `/inference/v1/generate` and `/inference/v1/abort_requests`.

Token ids in, token ids out, with log-probs and weight-version spans, at once or, where the client streams, in
increments (`increments`). A host that is not in the rollout role, or was
LOST and has not joined again, answers 503 `not_serving`, a full one 429 `too_many_requests`, a call that can never be
served 400 `invalid_request`. A client that goes away frees the call's place.

Invariant: a call is behind the door from before it is in the engine until its answer is whole, or its client is gone.

Awaits: a call is woken by the engine's answer, the client's going, an abort or `CALL_BOUND_S`, after which it is
answered as far as it came.
"""

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opengyre.host.door import Door, FullError, NotServingError
from opengyre.host.engine import Engine
from opengyre.host.increments import Increments, choice_of
from opengyre.tiny.types import (
    EngineBusyError,
    EngineError,
    GenerateRequest,
    GenerateResult,
    InvalidRequestError,
    WrongStateError,
)

CALL_BOUND_S = 900.0
MAX_BODY_BYTES = 8 << 20
GONE = 499
ID_PREFIX = "generate-tokens-"
INTERVAL_S = 0.03
LEAST_S = 0.005
MOST_S = 60.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = 0
    """0 or nothing: the sampled token's own log-prob, which is always given."""
    ignore_eos: bool = False


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str | None = None
    stream: bool = False
    priority: int = 0
    """Of the calls that wait for the engine the least comes first."""
    stream_interval_s: float | None = None
    """Seconds between increments at least. Where it is given, an answer that is whole before the first of them is due
    comes as one JSON object, as if `stream` were false."""


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    request_ids: list[str] | None = None
    """None aborts all."""


def to_request(body: GenerateBody, engine_id: str, seed: int) -> GenerateRequest:
    """Raises `InvalidRequestError` for what no engine of ours does."""
    params = body.sampling_params
    interval_of(body)
    if params.logprobs:
        raise InvalidRequestError(f"sampling_params.logprobs is {params.logprobs}; allowed are 0 and null")
    if not math.isfinite(params.temperature):
        raise InvalidRequestError("sampling_params.temperature is not finite; allowed are values from 0 to 100")
    return GenerateRequest(
        request_id=engine_id,
        token_ids=tuple(body.token_ids),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        stop_token_ids=tuple(params.stop_token_ids),
        seed=params.seed if params.seed is not None else seed,
        ignore_eos=params.ignore_eos,
        priority=body.priority,
    )


def to_answer(request_id: str, result: GenerateResult, engine_s: float) -> dict[str, Any]:
    """The answer's JSON object. `engine_s`: how long the call was in the engine, so that a caller can tell what the
    way to it cost."""
    choice = choice_of(result.token_ids, result.logprobs, result.weight_versions, result.finish_reason)
    return {"request_id": request_id, "engine_s": engine_s, "choices": [choice]}


def interval_of(body: GenerateBody) -> float:
    """Seconds between increments; raises `InvalidRequestError`."""
    wished = INTERVAL_S if body.stream_interval_s is None else body.stream_interval_s
    if not LEAST_S <= wished <= MOST_S:
        raise InvalidRequestError(f"stream_interval_s is {wished}; allowed are values from {LEAST_S} to {MOST_S}")
    return wished


class Inference:
    """The endpoint. `look` may shut the door before a call comes to it; `why_not` says why the host does not serve."""

    def __init__(
        self, engine: Engine, door: Door, why_not: Callable[[], str], look: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._door = door
        self._why_not = why_not
        self._look = look
        self._numbers = itertools.count()
        self._calls: dict[str, tuple[str, float]] = {}
        """Engine's identifier -> the client's, and when it came in."""
        self.moved = 0
        """Calls that were answered with partial tokens, since the start."""

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", self.abort, methods=["POST"]),
        ]

    def ages(self) -> dict[str, float]:
        """Seconds since each call in flight came in, by the engine's identifier."""
        now = time.monotonic()
        return {engine_id: now - since for engine_id, (_, since) in self._calls.items()}

    async def generate(self, request: Request) -> Response:
        with contextlib.ExitStack() as place:
            try:
                body = msgspec.json.decode(await _body(request), type=GenerateBody)
                self._look()
                place.enter_context(self._door.inside())
                return await self._call(request, body, place)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except (NotServingError, WrongStateError):
                return _error(503, "not_serving", self._why_not())
            except (FullError, EngineBusyError) as error:
                return _error(429, "too_many_requests", str(error))
            except (msgspec.DecodeError, InvalidRequestError) as error:
                return _error(400, "invalid_request", str(error))
            except EngineError as error:
                return _error(503, "engine_failed", str(error))

    async def _call(self, request: Request, body: GenerateBody, place: contextlib.ExitStack) -> Response:
        """`place` is left when the answer is made; one that comes in increments takes it over."""
        # The engine's identifier is our own: a client that lost its connection may repeat its identifier at once.
        engine_id = f"{next(self._numbers)}:{body.request_id}"
        seed = random.getrandbits(63)
        answer = self._engine.submit(to_request(body, engine_id, seed))
        place.callback(answer.cancel)
        interval = interval_of(body)
        since = time.monotonic()  # the loop's clock goes by milliseconds
        self._calls[engine_id] = (body.request_id, since)
        place.callback(self._calls.pop, engine_id)
        gone = asyncio.ensure_future(_disconnected(request))
        place.callback(gone.cancel)
        first = CALL_BOUND_S
        if body.stream:
            first = 0.0 if body.stream_interval_s is None else interval
        done, _ = await asyncio.wait({answer, gone}, timeout=first, return_when=asyncio.FIRST_COMPLETED)
        if body.stream and (not done or body.stream_interval_s is None):

            def ended(result: GenerateResult) -> float:
                self.moved += result.finish_reason == "abort"
                return round(time.monotonic() - since, 6)

            return Increments(
                body.request_id, self._engine, engine_id, answer, gone, interval, CALL_BOUND_S, ended, place.pop_all()
            )
        if not done:
            await self._engine.abort([engine_id])
        elif answer not in done:
            return Response(status_code=GONE)
        result = await answer
        self.moved += result.finish_reason == "abort"
        return _json(200, to_answer(body.request_id, result, round(time.monotonic() - since, 6)))

    async def abort(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await _body(request) or b"{}", type=AbortBody)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except (msgspec.DecodeError, InvalidRequestError) as error:
            return _error(400, "invalid_request", str(error))
        wanted = None if body.request_ids is None else {name.removeprefix(ID_PREFIX) for name in body.request_ids}
        chosen = [engine_id for engine_id, (name, _) in self._calls.items() if wanted is None or name in wanted]
        aborted = await self._engine.abort(chosen) if chosen else 0
        return _json(200, {"status": "aborted", "aborted": aborted})


async def _body(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body is too large; allowed are {MAX_BODY_BYTES} bytes")
    return bytes(content)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(status: int, value: object) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _error(status: int, kind: str, message: str) -> Response:
    return _json(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})
