"""The edge as pure ASGI: what reaches the application, and how much of a body is read."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from opengyre.gateway.edge import Edge
from opengyre.gateway.problems import Problem, response


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        body = await Request(scope, receive).body()
    except Problem as problem:
        await response(problem)(scope, receive, send)
        return
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


class Answer:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.chunks_read = 0

    @property
    def detail(self) -> str:
        return msgspec.json.decode(self.body)["detail"]


async def ask(
    method: str = "GET",
    path: str = "/v1/tasks",
    headers: dict[str, str] | None = None,
    chunks: tuple[bytes, ...] = (),
    keys: tuple[str, ...] = (),
    limit: int = 1000,
) -> Answer:
    answer = Answer()
    left: Iterator[bytes] = iter(chunks)

    async def receive() -> Message:
        answer.chunks_read += 1
        chunk = next(left, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b""}
    edge = Edge(echo, api_keys=[SecretStr(key) for key in keys], max_body_bytes=limit)
    await edge(scope, receive, send)
    return answer


JSON = {"Content-Type": "application/json"}


async def test_a_body_that_is_announced_too_large_is_not_read_at_all() -> None:
    answer = await ask("POST", headers={**JSON, "Content-Length": "1001"}, chunks=(b"x" * 1001,))
    assert (answer.status, answer.chunks_read) == (413, 0)
    assert "at most 1000 bytes" in answer.detail


async def test_a_body_of_unknown_length_is_read_up_to_the_limit_only() -> None:
    chunks = tuple(b"x" * 100 for _ in range(50))
    answer = await ask("POST", headers={**JSON, "Transfer-Encoding": "chunked"}, chunks=chunks)
    assert (answer.status, answer.chunks_read) == (413, 11)


async def test_a_body_of_the_limit_is_accepted() -> None:
    answer = await ask("POST", headers={**JSON, "Content-Length": "1000"}, chunks=(b"x" * 1000,))
    assert (answer.status, answer.body) == (200, b"1000 bytes")


@pytest.mark.parametrize("given", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Basic k1"}, {"X-API-Key": "\xff"}])
async def test_without_a_valid_key_nothing_is_reached(given: dict[str, str]) -> None:
    answer = await ask(headers=given, keys=("k1", "k2"))
    assert (answer.status, answer.chunks_read) == (401, 0)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "X-API-Key" in answer.detail


@pytest.mark.parametrize("given", [{"X-API-Key": "k2"}, {"Authorization": "Bearer k1"}, {"Authorization": "bearer k2"}])
async def test_each_key_and_both_headers_are_accepted(given: dict[str, str]) -> None:
    assert (await ask(headers=given, keys=("k1", "k2"))).status == 200


async def test_health_is_open_and_metrics_are_not() -> None:
    for path, status in (("/healthz", 200), ("/readyz", 200), ("/metrics", 401), ("/healthz/x", 401)):
        assert (await ask(path=path, keys=("k",))).status == status


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("application/problem+json", 200),
        ("text/plain", 415), ("", 415), ("application/x-www-form-urlencoded", 415),
    ],
)  # fmt: skip
async def test_a_body_must_be_json(content_type: str, status: int) -> None:
    answer = await ask("POST", headers={"Content-Type": content_type, "Content-Length": "2"}, chunks=(b"{}",))
    assert answer.status == status


async def test_a_post_without_a_body_needs_no_media_type() -> None:
    assert (await ask("POST", headers={"Content-Length": "0"})).status == 200
