"""The HTTP side: each live execution's endpoint, `/x/<execution>/v1/...`, in OpenAI's and in Anthropic's shape.

An execution's key is an HMAC of its id under a secret of the installation, so that every replica knows it and nothing
has to be handed over.

Awaits: a request is woken by its recorded calls; one that streams by its first news (`streams`).
"""

import dataclasses
import functools
import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from opengyre.proto.traj import Call
from opengyre.rollout import anthropic, completions, openai
from opengyre.rollout.ask import LANE_HEADER, ApiError, Ask, check
from opengyre.rollout.recorder import Recorder
from opengyre.rollout.spans import HEADER, spans, stage, written
from opengyre.rollout.streams import events, first_news, head_of, token_texts

MAX_BODY = 8 << 20
GONE = 499
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


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


@dataclass(frozen=True)
class Dialect:
    """How an API writes what all of them have."""

    parse: Callable[[bytes, str], Ask]
    completion: Callable[[Sequence[Call], str, Sequence[openai.Heard] | None], bytes]
    stream: Callable[[openai.Head, bool], openai.Stream]
    error_body: Callable[[ApiError], bytes]
    stream_error: Callable[[ApiError], Iterator[bytes]]
    status: Callable[[ApiError], int]
    waiting: bytes


def _status(error: ApiError) -> int:
    return error.status


_COMMENT = b": waiting\n\n"
CHAT = Dialect(
    openai.parse, openai.completion, openai.ChatStream, openai.error_body, openai.stream_error, _status, _COMMENT
)
COMPLETIONS = Dialect(
    completions.parse, completions.completion, completions.TextStream,
    openai.error_body, openai.stream_error, _status, _COMMENT,
)  # fmt: skip
MESSAGES = Dialect(
    anthropic.parse, anthropic.completion, anthropic.MessageStream,
    anthropic.error_body, anthropic.stream_error, anthropic.status_of, anthropic.waiting(),
)  # fmt: skip

Handler = Callable[[Recorder, Request], Awaitable[Response]]


class Endpoints:
    """The live executions' recorders, by execution."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._recorders: dict[str, Recorder] = {}

    def key(self, execution: str) -> str:
        """The key of an execution's endpoint."""
        return "gyre-" + hmac.new(self._secret, execution.encode(), hashlib.sha256).hexdigest()

    def open(self, recorder: Recorder) -> None:
        self._recorders[recorder.dispatch.execution] = recorder

    def close(self, execution: str) -> None:
        self._recorders.pop(execution, None)

    def routes(self) -> Sequence[BaseRoute]:
        served: tuple[tuple[str, str, Dialect, Handler], ...] = (
            ("POST", "chat/completions", CHAT, functools.partial(_ask, CHAT)),
            ("POST", "completions", COMPLETIONS, functools.partial(_ask, COMPLETIONS)),
            ("POST", "messages", MESSAGES, functools.partial(_ask, MESSAGES)),
            ("POST", "messages/count_tokens", MESSAGES, _count),
            ("GET", "models", CHAT, _models),
            ("GET", "models/{model}", CHAT, _models),
        )
        return [
            *self._served(served),
            Route("/x/{execution}/v1/{path:path}", self._serve(CHAT, _unknown), methods=METHODS),
        ]

    def _served(self, served: Sequence[tuple[str, str, Dialect, Handler]]) -> list[BaseRoute]:
        return [
            Route(f"/x/{{execution}}/v1/{path}", self._serve(dialect, handler), methods=[method])
            for method, path, dialect, handler in served
        ]

    def _serve(self, dialect: Dialect, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                return await handler(self._recorder(request), request)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except ApiError as error:
                headers = {"x-should-retry": "true" if error.retry else "false"}
                if error.retry_after_s is not None:
                    headers["retry-after"] = f"{error.retry_after_s:g}"
                return _json(dialect.error_body(error), dialect.status(error), headers)

        return serve

    def _recorder(self, request: Request) -> Recorder:
        execution = request.path_params["execution"]
        bearer = request.headers.get("authorization", "").partition(" ")[2].strip()
        given = bearer or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self.key(execution).encode()):
            raise ApiError(
                401,
                "Incorrect API key: send the execution's own as a bearer token or as x-api-key.",
                code="invalid_api_key",
            )
        recorder = self._recorders.get(execution)
        if recorder is None:
            raise ApiError(404, f"Execution {execution} is not live here.", code="execution_not_found", retry=True)
        return recorder


async def _unknown(_recorder: Recorder, request: Request) -> Response:
    path = request.path_params["path"]
    raise ApiError(
        404,
        f"{request.method} /v1/{path} is not served; there are chat/completions, completions, messages, "
        "messages/count_tokens and models.",
        code="not_found",
    )


async def _models(recorder: Recorder, request: Request) -> Response:
    run = recorder.dispatch.run
    name = request.path_params.get("model")
    if name is None:
        return _json(openai.models(run))
    if name != run:
        raise ApiError(404, f"The model {name!r} does not exist; there is {run!r}.", code="model_not_found")
    return _json(openai.model(run))


async def _count(recorder: Recorder, request: Request) -> Response:
    return _json(anthropic.counted(await recorder.count(anthropic.parse(await _body(request), counting=True))))


async def _ask(dialect: Dialect, recorder: Recorder, request: Request) -> Response:
    with spans() as found:
        with stage("parse"):
            ask = _asked(dialect, recorder, request, await _body(request))
        if ask.stream:
            choices = await recorder.begin(ask)
            await first_news(choices, live=recorder.dispatch.harness.streams == "live")
            stream = dialect.stream(head_of(recorder, choices), ask.usage)
            said = events(recorder, ask, choices, stream, dialect.waiting, dialect.stream_error)
            return StreamingResponse(said, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        calls = await recorder.answer(ask)
        with stage("write"):
            heard = None
            if ask.logprobs:
                heard = [token_texts(recorder.renderer, call.sampled_ids, call.logprobs) for call in calls]
            body = dialect.completion(calls, recorder.dispatch.run, heard)
        return _json(body, headers={HEADER: written(found)})


def _asked(dialect: Dialect, recorder: Recorder, request: Request, body: bytes) -> Ask:
    lane = _lane(recorder, request.headers.get(LANE_HEADER))
    salt = request.headers.get("idempotency-key", "")
    if lane is not None:
        salt = f"lane {lane} {salt}"
    elif recorder.step:
        salt = f"step {recorder.step} {salt}"
    return dataclasses.replace(dialect.parse(body, salt), lane=lane)


def _lane(recorder: Recorder, value: str | None) -> int | None:
    if value is None:
        return None
    branching = recorder.dispatch.harness.branching
    copies = 0 if branching is None else branching.copies
    check(LANE_HEADER, value in map(str, range(copies)), f"is not a lane of this execution, which has {copies}")
    return int(value)


async def _body(request: Request) -> bytes:
    """At most `MAX_BODY` bytes are kept, whatever length the client gave or did not give."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise ApiError(413, f"The request body is too large; allowed are {MAX_BODY} bytes.")
    return bytes(content)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, media_type="application/json", headers=headers)
