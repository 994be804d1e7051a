"""Buckets (NATS KV): what is now. Typed values, compare-and-set, keys with a time to live, mirrors and leases.

Invariants:
- A read that decides goes to the leader (`get`); a mirror (`View`) is for looking, and is at most 10 s behind. It is
  whole when it is given out, however long broker or process stalled meanwhile.
- A key with a time to live has one value only (history 1), and its expiry is seen by watchers as a deletion.
- A lease is a key with an owner; its revision is the fencing token.

Awaits: `View.changed` is woken by the watcher or its timeout; the watcher is rebuilt after a reconnect and whenever
nothing was heard for 10 s, because watchers do fall silent.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec
import nats.errors
from nats.js import errors as js_errors
from nats.js.kv import KeyValue

from opengyre.shared.bus.connection import ATTEMPTS, WRONG_LAST_SEQUENCE, Bus
from opengyre.shared.bus.errors import BusUnavailableError, ConflictError, NotBootstrappedError
from opengyre.shared.bus.promptly import promptly
from opengyre.shared.bus.stored import Stored

log = logging.getLogger("gyre.bus")

T = TypeVar("T", bound=msgspec.Struct)
GONE = ("DEL", "PURGE")
RELEASE_S = 2.0
"""Of one who is leaving, and whose caller has waited long enough."""

# The last is what the client makes of an entry that waited too long in it while the watcher was being made.
_BROKEN = (nats.errors.Error, js_errors.Error, asyncio.InvalidStateError)


def is_gone(last: Stored) -> bool:
    """Whether a key's last message says that it was deleted or has expired."""
    return "Nats-Marker-Reason" in last.headers or last.headers.get("KV-Operation") in GONE


class Bucket(Generic[T]):
    """A bucket whose values are `kind`, as JSON."""

    def __init__(self, bus: Bus, name: str, kind: type[T]) -> None:
        self._bus = bus
        self.name = name
        self._stream = f"KV_{name}"
        self._decoder = msgspec.json.Decoder(kind)

    def subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"

    async def get(self, key: str) -> tuple[T, int] | None:
        """The value and its revision, read from the leader; None if there is no such key."""
        last = await self._bus.last(self.subject(key), self._stream)
        if last is None or is_gone(last):
            return None
        return self._decoder.decode(last.payload), last.sequence

    async def put(self, key: str, value: T, *, ttl_s: int | None = None) -> int:
        """Set it whatever it was; return the revision. The last writer wins."""
        return await self._write(key, msgspec.json.encode(value), None, ttl_s, None)

    async def create(self, key: str, value: T, *, ttl_s: int | None = None) -> int:
        """Set it if there is no such key (or it expired or was deleted), else raise `ConflictError`."""
        payload = msgspec.json.encode(value)
        with contextlib.suppress(ConflictError):
            return await self._write(key, payload, 0, ttl_s, None)
        last = await self._bus.last(self.subject(key), self._stream)
        if last is None:
            return await self._write(key, payload, 0, ttl_s, None)
        if is_gone(last):
            return await self._write(key, payload, last.sequence, ttl_s, None)
        raise ConflictError(f"{self.name}/{key} exists")

    async def update(self, key: str, value: T, revision: int, *, ttl_s: int | None = None) -> int:
        """Set it if its revision is still `revision`, else raise `ConflictError`."""
        return await self._write(key, msgspec.json.encode(value), revision, ttl_s, None)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove it; with `revision`, only if that is still its revision (else `ConflictError`)."""
        await self._write(key, b"", revision, None, "DEL")

    async def _write(self, key: str, payload: bytes, expect: int | None, ttl_s: int | None, op: str | None) -> int:
        headers: dict[str, str] = {}
        if expect is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect)
        if ttl_s is not None:
            headers["Nats-TTL"] = str(max(1, int(ttl_s)))
        if op is not None:
            headers["KV-Operation"] = op
        for attempt in range(ATTEMPTS):
            try:
                return (await promptly(self._bus.js.publish(self.subject(key), payload, headers=dict(headers)))).seq
            except js_errors.NoStreamResponseError as error:
                if self._bus.connected and attempt == ATTEMPTS - 1:  # before that it may have lost its leader
                    raise NotBootstrappedError(f"bucket {self.name} is missing: run the bootstrap") from error
                failure: Exception = error
            except js_errors.APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    mine = await self._in_doubt(key, payload, expect) if attempt else None
                    if mine is not None:
                        return mine
                    raise ConflictError(f"{self.name}/{key} has changed") from error
                if not isinstance(error, js_errors.ServiceUnavailableError):
                    raise
                failure = error
            except (nats.errors.TimeoutError, nats.errors.OutboundBufferLimitError) as error:
                failure = error
            log.info("bus: write to %s/%s is in doubt (%r)", self.name, key, failure)
            await asyncio.sleep(min(0.05 * 2**attempt, 2) * random.uniform(0.5, 1))  # noqa: S311 - jitter
        raise BusUnavailableError(f"{self.name}/{key}: not acknowledged")

    async def _in_doubt(self, key: str, payload: bytes, expect: int | None) -> int | None:
        """After an unacknowledged attempt: the revision, if what is there is what we wrote."""
        last = await self._bus.last(self.subject(key), self._stream)
        if last is not None and last.payload == payload and expect is not None and last.sequence > expect:
            return last.sequence
        return None

    @contextlib.asynccontextmanager
    async def view(self) -> AsyncIterator["View[T]"]:
        """A mirror of the whole bucket, complete on entry."""
        view: View[T] = View(self._bus, self.name, self._decoder)
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(view.keep())
            try:
                async with asyncio.timeout(30):
                    await view.filled.wait()
                yield view
            finally:
                keeper.cancel()


class View(Generic[T]):
    """A bucket's present content in memory. `values` is replaced key by key; read it between awaits."""

    def __init__(self, bus: Bus, name: str, decoder: msgspec.json.Decoder[T]) -> None:
        self._bus = bus
        self._name = name
        self._decoder = decoder
        self._changed = asyncio.Event()
        self.filled = asyncio.Event()
        self.values: dict[str, T] = {}
        self.revisions: dict[str, int] = {}

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change, `timeout_s` at most; whether there was one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
                return True
        return False

    def learn(self, key: str, value: T, revision: int) -> None:
        """Take what this process has itself just written, so that its own next look sees that."""
        if self.revisions.get(key, 0) < revision:
            self.values[key] = value
            self.revisions[key] = revision
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def keep(self) -> None:
        """Watch until cancelled; a silent or broken watcher is built anew."""
        failures = 0
        while True:
            try:
                await self._watch()
                failures = 0
            except (*_BROKEN, BusUnavailableError, OSError, TimeoutError) as error:
                failures += 1
                log.info("bus: watcher of %s is built anew (%r)", self._name, error)
                await asyncio.sleep(min(0.1 * 2**failures, 5) * random.uniform(0.5, 1))  # noqa: S311 - jitter

    async def _watch(self) -> None:
        generation = self._bus.generation
        kv = await promptly(self._bus.js.key_value(self._name))
        watcher = await promptly(kv.watchall(inactive_threshold=60))
        try:
            found: set[str] = set()
            seen: set[str] = set()
            # The client's own mark of completeness is not heeded: under load it comes before the first entry.
            filling = not await self._empty()
            if not filling:
                await self._complete(found)
            quiet = 0.0
            while generation == self._bus.generation and quiet < 10:
                try:
                    # Not `watcher.updates`: Python 3.11's wait_for loses a cancellation that comes with a result.
                    async with asyncio.timeout(0.5):
                        entry = await anext(watcher)
                except TimeoutError:
                    quiet += 0.5
                    if filling and await self._all_in(seen):
                        filling = False
                        await self._complete(found)
                    continue
                if not isinstance(entry, KeyValue.Entry):
                    continue
                quiet = 0.0
                self._take(entry)
                if filling:
                    seen.add(entry.key)
                    if entry.key in self.values and entry.operation not in GONE:
                        found.add(entry.key)
                    if not entry.delta:  # nothing was pending behind it
                        filling = False
                        await self._complete(found)
        finally:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                async with asyncio.timeout(2):
                    await promptly(watcher.stop())

    async def _empty(self) -> bool:
        return (await self._bus.stream_info(f"KV_{self._name}")).state.messages == 0

    async def _all_in(self, seen: set[str]) -> bool:
        """Whether nothing is there that was not seen. Silence alone says nothing: who stalls is silent too."""
        prefix = f"$KV.{self._name}."
        there = await self._bus.subjects(f"KV_{self._name}", f"{prefix}>")
        return all(subject.removeprefix(prefix) in seen for subject in there)

    async def _complete(self, found: set[str]) -> None:
        """All that there is was seen: forget the keys that were not, unless they were written meanwhile."""
        for key in set(self.values) - found:
            last = await self._bus.last(f"$KV.{self._name}.{key}", f"KV_{self._name}")
            if last is None or is_gone(last):
                self._drop(key)
        self.filled.set()
        self._notify()

    def _take(self, entry: KeyValue.Entry) -> None:
        if entry.operation in GONE:
            if entry.key in self.values and self.revisions[entry.key] < (entry.revision or 0):
                self._drop(entry.key)
                self._notify()
            return
        if self.revisions.get(entry.key, 0) >= (entry.revision or 0):
            return
        try:
            value = self._decoder.decode(entry.value or b"")
        except msgspec.DecodeError as error:
            log.warning("bus: %s/%s cannot be decoded: %s", self._name, entry.key, error)
            return
        self.values[entry.key] = value
        self.revisions[entry.key] = entry.revision or 0
        self._notify()

    def _drop(self, key: str) -> None:
        self.values.pop(key, None)
        self.revisions.pop(key, None)


class LeaseOwner(msgspec.Struct, frozen=True):
    owner: str


class Lease:
    """A key that one owner holds for a time to live. `token` is the fencing token: greater for each later owner."""

    def __init__(self, bucket: Bucket[LeaseOwner], key: str, owner: str, ttl_s: int) -> None:
        self._bucket = bucket
        self._key = key
        self._owner = LeaseOwner(owner)
        self.ttl_s = ttl_s
        self._revision = 0
        self.token = 0

    async def acquire(self) -> bool:
        """Try once to become the owner."""
        try:
            self._revision = self.token = await self._bucket.create(self._key, self._owner, ttl_s=self.ttl_s)
        except ConflictError:
            return False
        return True

    async def renew(self) -> bool:
        """Whether it is still ours."""
        try:
            self._revision = await self._bucket.update(self._key, self._owner, self._revision, ttl_s=self.ttl_s)
        except ConflictError:
            return False
        return True

    async def release(self) -> None:
        """Give it up; where the broker does not answer in `RELEASE_S`, its time to live ends it."""
        with contextlib.suppress(ConflictError, BusUnavailableError, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self._bucket.delete(self._key, self._revision)
