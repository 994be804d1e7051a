"""A client of the REST API that outlives the gateway: it repeats what was not answered, for so long.

Everything it posts is idempotent by its content, so a repetition changes nothing.

Awaits: each request has a bound, and all tries together have `patience_s`.
"""

import asyncio
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

T = TypeVar("T")


class ApiError(Exception):
    """The API refused a request for good, or did not answer for too long."""


class Api:
    """Use as `async with Api(url, key) as api`."""

    def __init__(self, url: str, key: str | None, patience_s: float = 90.0) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._patience_s = patience_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=20))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: Any) -> bytes:
        return await self._request("POST", path, msgspec.json.encode(body))

    async def get(self, path: str, kind: type[T]) -> T:
        return msgspec.json.decode(await self._request("GET", path, None), type=kind)

    async def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        headers = {"Content-Type": "application/json"} if body is not None else {}
        delay = 0.1
        while True:
            try:
                async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
                    content = await response.read()
                    if response.status < 400:
                        return content
                    problem = f"{method} {path}: {response.status} {content[:500].decode('utf-8', 'replace')}"
                    if response.status < 500 and response.status != 429:
                        raise ApiError(problem)
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{method} {path}: {error!r}"
            if loop.time() + delay > deadline:
                raise ApiError(f"no answer in {self._patience_s:g} s; the last: {problem}")
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)
