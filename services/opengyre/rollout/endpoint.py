"""The HTTP side: each live execution's endpoint, `/x/<execution>/v1/...`, in OpenAI's shape.

An execution's key is an HMAC of its id under a secret of the installation, so that every replica knows it and nothing
has to be handed over.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from opengyre.proto.traj import Call
from opengyre.rollout import openai
from opengyre.rollout.openai import ApiError, ChatRequest
from opengyre.rollout.recorder import Recorder

MAX_BODY = 8 << 20
GONE = 499
KEEP_ALIVE_S = 10.0
"""A stream whose call takes longer begins with comments, so that clients do not give up."""


def load_secret(folder: Path) -> bytes:
    """The installation's secret, made at first use; readable by its owner only."""
    path = folder / "rollout.secret"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".rollout.secret.{secrets.token_hex(8)}"
    if not path.exists():
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)  # fails where another replica was first, whose secret then holds
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return path.read_bytes()


class Endpoints:
    """The live executions' recorders, by execution."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._recorders: dict[str, Recorder] = {}

    def key(self, execution: str) -> str:
        """The bearer key of an execution's endpoint."""
        return "gyre-" + hmac.new(self._secret, execution.encode(), hashlib.sha256).hexdigest()

    def open(self, recorder: Recorder) -> None:
        self._recorders[recorder.dispatch.execution] = recorder

    def close(self, execution: str) -> None:
        self._recorders.pop(execution, None)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/x/{execution}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/x/{execution}/v1/models", self._models, methods=["GET"]),
        ]

    def _recorder(self, request: Request) -> Recorder:
        execution = request.path_params["execution"]
        given = request.headers.get("authorization", "").partition(" ")[2].strip()
        if not hmac.compare_digest(given.encode(), self.key(execution).encode()):
            raise ApiError(
                401, "Incorrect API key: send the execution's own as a bearer token.", code="invalid_api_key"
            )
        recorder = self._recorders.get(execution)
        if recorder is None:
            raise ApiError(404, f"Execution {execution} is not live here.", code="execution_not_found", retry=True)
        return recorder

    async def _models(self, request: Request) -> Response:
        try:
            recorder = self._recorder(request)
        except ApiError as error:
            return _refused(error)
        return _json(openai.models(recorder.dispatch.run))

    async def _chat(self, request: Request) -> Response:
        try:
            recorder = self._recorder(request)
            body = await _body(request)
            answering = asyncio.create_task(recorder.answer(body))
            answering.add_done_callback(_collect)
            done, _ = await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
            while not done:
                if b'"stream"' in body and openai.parse(body).stream:
                    return _streamed(_later(recorder, answering))
                done, _ = await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
            call, chat = answering.result()
        except ClientDisconnect:
            return Response(status_code=GONE)
        except ApiError as error:
            return _refused(error)
        if chat.stream:
            return _streamed(_chunks(recorder, call, chat))
        return _json(openai.completion(call, recorder.dispatch.run, _texts(recorder, call, chat)))


def _collect(answering: "asyncio.Task[tuple[Call, ChatRequest]]") -> None:
    """The client may be gone when the call fails."""
    if not answering.cancelled():
        answering.exception()


async def _body(request: Request) -> bytes:
    """At most `MAX_BODY` bytes are kept, whatever length the client gave or did not give."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise ApiError(413, f"The request body is too large; allowed are {MAX_BODY} bytes.")
    return bytes(content)


def _texts(recorder: Recorder, call: Call, chat: ChatRequest) -> list[str] | None:
    return recorder.token_texts(call) if chat.logprobs else None


def _events(recorder: Recorder, call: Call, chat: ChatRequest) -> Iterable[bytes]:
    usage = chat.stream_options is not None and chat.stream_options.include_usage
    return openai.stream(call, recorder.dispatch.run, _texts(recorder, call, chat), usage=usage)


async def _chunks(recorder: Recorder, call: Call, chat: ChatRequest) -> AsyncIterator[bytes]:
    for event in _events(recorder, call, chat):
        yield event


async def _later(recorder: Recorder, answering: "asyncio.Task[tuple[Call, ChatRequest]]") -> AsyncIterator[bytes]:
    while not answering.done():
        yield b": waiting\n\n"
        await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
    try:
        events = _events(recorder, *answering.result())
    except ApiError as error:
        events = openai.stream_error(error)
    for event in events:
        yield event


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _refused(error: ApiError) -> Response:
    return _json(error.body(), error.status, {"x-should-retry": "true" if error.retry else "false"})


def _streamed(chunks: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
