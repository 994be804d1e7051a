"""What is checked before a request reaches its route: the API key, the media type, the size of the body.

Invariant: no more than `max_body_bytes` of a body are kept; a request without a valid key reaches no route.
"""

import hmac
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opengyre.gateway.problems import Problem, response

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[SecretStr], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.get_secret_value().encode() for key in api_keys]
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope)
        if problem is not None:
            await response(problem)(scope, receive, send)
            return
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, bounded, send)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if self._keys and scope["path"] not in OPEN_PATHS and not self._known(headers):
            return Problem(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            return self._too_large()
        has_body = scope["method"] in BODY_METHODS and (length not in ("", "0") or "transfer-encoding" in headers)
        if has_body and not _is_json(headers.get("content-type", "")):
            sent = headers.get("content-type") or "nothing"
            return Problem(415, f"Content-Type is {sent[:80]}; allowed is application/json")
        return None

    def _too_large(self) -> Problem:
        # The connection stays open: the server throws away what still comes, while closing it under a client that is
        # sending would lose this answer.
        return Problem(413, f"the body is too large; allowed are at most {self._limit} bytes")

    def _known(self, headers: Headers) -> bool:
        given = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        matches = [hmac.compare_digest(given.encode("utf-8", "replace"), key) for key in self._keys]
        return any(matches)  # of all keys, so that the time taken tells nothing


def _is_json(content_type: str) -> bool:
    media = content_type.partition(";")[0].strip().lower()
    return media == "application/json" or (media.startswith("application/") and media.endswith("+json"))
