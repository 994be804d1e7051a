"""Requests and answers between services, as NATS micro services (discoverable: `nats micro ls`).

Invariants: a handler runs in a task of its own, so a long one does not hold the others; every request is answered,
with a value or with an error of a kind; a call has a timeout, and repeats only while nobody is there to answer or
the answer is overdue, until its patience ends. Requests must be idempotent.

Awaits: `call` is woken by the answer or its timeout.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import nats.errors
import nats.micro
from nats.micro.request import Request
from nats.micro.service import EndpointConfig, ServiceConfig

from opengyre.proto import subjects
from opengyre.proto.base import RpcError
from opengyre.shared import tracing
from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.errors import RpcFailedError, RpcUnavailableError
from opengyre.shared.bus.promptly import promptly

log = logging.getLogger("gyre.bus")

Reply = TypeVar("Reply")
ERROR = "Nats-Service-Error"
ERROR_CODE = "Nats-Service-Error-Code"


@dataclass(frozen=True)
class Endpoint:
    """`handler` gets a `request` and returns the answer, or raises `RpcFailedError(kind, message)`."""

    request: type
    handler: Callable[[Any], Awaitable[msgspec.Struct]]


@contextlib.asynccontextmanager
async def serving(
    bus: Bus, service: str, target: str, endpoints: Mapping[str, Endpoint], description: str = ""
) -> AsyncIterator[None]:
    """Answer requests on `gyre.v1.rpc.<service>.<target>.<verb>` for as long as the block lasts.

    Replicas that serve the same target share its requests (a queue group).
    """
    async with asyncio.TaskGroup() as tasks:

        def spawn(endpoint: Endpoint) -> Callable[[Request], Awaitable[None]]:
            async def on_request(request: Request) -> None:
                tasks.create_task(_answer(request, endpoint))

            return on_request

        micro = await nats.micro.add_service(
            bus.client,
            ServiceConfig(
                name=f"gyre-{service}-{target}",
                version="1.0.0",
                description=description or f"OpenGyre {service}",
            ),
        )
        try:
            for verb, endpoint in endpoints.items():
                await micro.add_endpoint(
                    EndpointConfig(name=verb, subject=subjects.rpc(service, target, verb), handler=spawn(endpoint))
                )
            yield
        finally:
            with contextlib.suppress(nats.errors.Error):
                await promptly(micro.stop())


async def _answer(request: Request, endpoint: Endpoint) -> None:
    headers: dict[str, str] | None = None
    try:
        with tracing.consuming(request.subject, request.headers or {}):
            value = await endpoint.handler(msgspec.json.decode(request.data, type=endpoint.request))
        payload = msgspec.json.encode(value)
    except RpcFailedError as error:
        payload, headers = _refusal(error.kind, str(error))
    except msgspec.DecodeError as error:
        payload, headers = _refusal("invalid_request", f"the request cannot be read: {error}")
    except Exception as error:
        log.exception("rpc: %s failed", request.subject)
        payload, headers = _refusal("internal", repr(error))
    with contextlib.suppress(nats.errors.Error):
        await promptly(request.respond(payload, headers))


def _refusal(kind: str, message: str) -> tuple[bytes, dict[str, str]]:
    return msgspec.json.encode(RpcError(kind=kind, message=message)), {ERROR: kind, ERROR_CODE: "400"}


async def call(
    bus: Bus,
    service: str,
    target: str,
    verb: str,
    request: msgspec.Struct,
    reply: type[Reply],
    *,
    timeout_s: float = 5.0,
    patience_s: float = 30.0,
) -> Reply:
    """Ask and return the answer.

    `timeout_s` bounds one attempt, `patience_s` all of them. Raises `RpcFailedError` with the kind that the other
    side gave, `RpcUnavailableError` when nobody answered.
    """
    subject = subjects.rpc(service, target, verb)
    payload = msgspec.json.encode(request)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    delay = 0.02
    while True:
        headers: dict[str, str] = {}
        tracing.inject(headers)
        try:
            message = await promptly(bus.client.request(subject, payload, timeout=timeout_s, headers=headers or None))
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError, nats.errors.OutboundBufferLimitError) as error:
            if loop.time() + delay >= deadline:
                raise RpcUnavailableError(
                    f"{service} does not answer ({verb} on {target}, {patience_s:g} s)"
                ) from error
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)
            continue
        if message.headers and ERROR in message.headers:
            error = msgspec.json.decode(message.data, type=RpcError)
            raise RpcFailedError(error.kind, error.message)
        return msgspec.json.decode(message.data, type=reply)
