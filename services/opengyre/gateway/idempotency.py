"""Idempotency keys: the first answer is kept for a day, and a repeated request gets it again.

States of a key: absent -> reserved (the first request is being handled, `RESERVED_S` at most) -> answered. A request
that was refused leaves no trace, so that it can be corrected under the same key.

Awaits: the bucket, within the bound of the route, and then for `FORGET_S` at most.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response

from opengyre.gateway.problems import Problem
from opengyre.proto import subjects
from opengyre.shared.bus import Bucket, Bus, BusError, ConflictError

RESERVED_S = 60
FORGET_S = 2.0
MAX_KEY = 200


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    request: str
    """Digest of the request that the key was first used for."""
    status: int = 0
    """0 while the first request is being handled."""
    body: str = ""


async def once(bus: Bus, key: str | None, request: str, handle: Callable[[], Awaitable[tuple[int, bytes]]]) -> Response:
    """Answer with what `handle` gives, or with what it gave under the same `key` for the same `request`.

    `request` is what makes two requests the same: route and content. Raises `Problem` 409 while the first is being
    handled and 422 when the key was used for another request.
    """
    if key is None:
        status, body = await handle()
        return Response(body, status_code=status, media_type="application/json")
    if not 1 <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
        allowed = f"1 to {MAX_KEY} printable ASCII characters"
        raise Problem(422, f"Idempotency-Key has {len(key)} characters; allowed are {allowed}", field="Idempotency-Key")
    bucket = Bucket(bus, subjects.KV_IDEMPOTENCY, KeptAnswer)
    name = hashlib.sha256(key.encode()).hexdigest()
    digest = hashlib.sha256(request.encode("utf-8", "replace")).hexdigest()
    try:
        revision = await bucket.create(name, KeptAnswer(request=digest), ttl_s=RESERVED_S)
    except ConflictError:
        return _repeated(await bucket.get(name), digest)
    done = False
    try:
        status, body = await handle()
        await bucket.update(name, KeptAnswer(request=digest, status=status, body=body.decode()), revision)
        done = True
    finally:
        if not done:
            # The bound of the route may be over: else the reservation's time to live is what ends it.
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(FORGET_S):
                    await bucket.delete(name, revision)
    return Response(body, status_code=status, media_type="application/json")


def _repeated(found: tuple[KeptAnswer, int] | None, digest: str) -> Response:
    if found is not None and found[0].request != digest:
        raise Problem(
            422,
            "Idempotency-Key was used for another request; allowed is a new key, or the same request again",
            field="Idempotency-Key",
        )
    if found is None or found[0].status == 0:
        detail = "the first request with this Idempotency-Key is still being handled; try again later"
        raise Problem(409, detail, field="Idempotency-Key", headers={"Retry-After": "1"})
    kept = found[0]
    return Response(
        kept.body, status_code=kept.status, media_type="application/json", headers={"Idempotent-Replayed": "true"}
    )
