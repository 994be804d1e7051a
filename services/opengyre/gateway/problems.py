"""Errors as a person meets them: application/problem+json (RFC 9457) with one sentence in `detail`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from opengyre.shared.bus import (
    BusError,
    BusUnavailableError,
    NotBootstrappedError,
    QueueFullError,
    RpcFailedError,
    RpcUnavailableError,
    TooLargeError,
)

log = logging.getLogger("gyre.gateway")

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
PLACES = ("body", "query", "path", "header")
SHAPES = ("single", "batch")
"""Tags of the union of submissions; no fields of the caller's."""
UNKNOWN_FIELD, FIXED_FIELD = "unknown_field", "fixed_field"
"""Complaints of our own models; each has a whole sentence, and the field's name in its context."""
JSON_NAMES = {None: "null", True: "true", False: "false"}
ALLOWED = dict.fromkeys(("model_attributes_type", "model_type", "dict_type"), "allowed is a JSON object") | {
    "list_type": "allowed is a JSON list",
    "too_short": "allowed is one or more",
}
"""pydantic's kind of complaint -> a sentence without its words for Python."""
TITLES = {
    400: "Bad request", 401: "No valid API key", 404: "Not found", 405: "Method not allowed", 408: "Request too slow",
    409: "Conflict", 413: "Body too large", 415: "Unsupported media type", 422: "Not allowed", 429: "Too many requests",
    500: "Internal error", 503: "Not available now",
}  # fmt: skip


class Problem(Exception):  # noqa: N818 - an answer, not a fault
    """An answer other than the wished one."""

    def __init__(
        self, status: int, detail: str, *, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.headers = dict(headers or {})


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error."""

    title: str
    status: int
    detail: str
    """One sentence: what is wrong, and what is allowed."""
    field: str | None = None
    """The field or parameter that is wrong."""


def response(problem: Problem) -> Response:
    """The problem as an HTTP answer."""
    document = ProblemDocument(
        title=TITLES.get(problem.status, "Error"), status=problem.status, detail=problem.detail, field=problem.field
    )
    # A field's name is the caller's own text, and may hold what UTF-8 cannot express.
    body = msgspec.json.encode({k: _clean(v) for k, v in msgspec.to_builtins(document).items()})
    return Response(body, status_code=problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def _clean(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def of_bus(error: BusError) -> Problem:
    """What a fault of the bus, or another service's refusal, is to the caller."""
    again = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case RpcFailedError(kind="not_found"):
            return Problem(404, str(error))
        case RpcFailedError(kind="conflict"):
            return Problem(409, str(error))
        case RpcFailedError(kind="invalid_request"):
            return Problem(422, str(error))
        case TooLargeError():
            return Problem(413, str(error))
        case QueueFullError():
            return Problem(429, f"{error}; try again later", headers=again)
        case BusUnavailableError() | RpcUnavailableError() | NotBootstrappedError() | RpcFailedError():
            return Problem(503, str(error), headers=again)
    log.error("bus: %r", error)
    return Problem(503, f"the bus failed: {error}", headers=again)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The first of pydantic's complaints as a sentence."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part not in (*PLACES, *SHAPES)]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return Problem(400, f"the body is not valid JSON: {reason} at character {where[0] if where else 0}")
    field = ".".join(where) or str(first["loc"][0] if first["loc"] and first["loc"][0] in PLACES else "body")
    if first["type"] == "missing" and not where:
        return Problem(422, "the body is missing; allowed is a JSON object", field=field)
    if first["type"] == "missing":
        return Problem(422, f"{field} is missing", field=field)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] in (UNKNOWN_FIELD, FIXED_FIELD):
        name = str((first.get("ctx") or {}).get("name", ""))
        full = ".".join([*where, name])
        if first["type"] == FIXED_FIELD:
            return Problem(422, f"{full}{message.removeprefix(name)}", field=full)
        return Problem(422, f"{field}: {message}" if where else message, field=full)
    message = ALLOWED.get(first["type"], message)
    return Problem(422, f"{field} is {_shown(first.get('input'))}: {message[:1].lower()}{message[1:]}", field=field)


def _shown(value: Any) -> str:
    text = JSON_NAMES.get(value, repr(value)) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _methods(app: FastAPI, path: str) -> str:
    """What is allowed on a path, over all its routes (the router's own answer names the first route's only)."""
    found: set[str] = set()
    for route in [*app.routes, *getattr(app.state, "routes", ())]:
        pattern, methods = getattr(route, "path_regex", None), getattr(route, "methods", None)
        if pattern is not None and methods and pattern.match(path):
            found |= methods
    return ", ".join(sorted(found))


def install(app: FastAPI) -> None:
    """Answer every exception with a problem document."""

    async def on_problem(_request: Request, error: Problem) -> Response:
        return response(error)

    async def on_bus(_request: Request, error: BusError) -> Response:
        return response(of_bus(error))

    async def on_validation(_request: Request, error: RequestValidationError) -> Response:
        return response(of_validation(error.errors()))

    async def on_http(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"there is no {request.url.path}; /openapi.json lists what there is"
        elif error.status_code == 405:
            allowed = _methods(app, request.url.path)
            detail = f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}"
            return response(Problem(405, detail, headers={"Allow": allowed}))
        elif error.status_code == 400:
            detail = "the body cannot be read: allowed is JSON in UTF-8"
        return response(Problem(error.status_code, detail, headers=error.headers))

    async def on_fault(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return response(Problem(500, "the gateway failed; its log says why"))

    app.add_exception_handler(Problem, on_problem)  # type: ignore[arg-type]  # Starlette types handlers by Exception alone
    app.add_exception_handler(BusError, on_bus)  # type: ignore[arg-type]  # Starlette types handlers by Exception alone
    app.add_exception_handler(RequestValidationError, on_validation)  # type: ignore[arg-type]  # Starlette types handlers by Exception alone
    app.add_exception_handler(HTTPException, on_http)  # type: ignore[arg-type]  # Starlette types handlers by Exception alone
    app.add_exception_handler(Exception, on_fault)
