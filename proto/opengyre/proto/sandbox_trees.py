"""Directories in and out of a sandbox, snapshots and forks: requests and answers of ``put``, ``get``, ``snapshot``,
``fork``, ``restore`` and ``drop``.

Directories travel as tar archives, plain, with regular files, folders, links and their modes; what is special (devices,
FIFOs, sockets) is left out. An archive of up to 256 KiB may be in the message, a larger one is in the blob store.
"""

from collections.abc import Mapping

from opengyre.proto.base import Record
from opengyre.proto.sandbox import SandboxRef


class PutRequest(Record, frozen=True, kw_only=True):
    """Unpack an archive into a directory, which is made (verb ``put``, answered by `PutResult`).

    An archive that would write outside of it, by ``..``, an absolute name or a link, is an ``invalid_request``.
    """

    sandbox: str
    """The sandbox's id."""
    path: str
    """The directory, as in `ReadRequest`; ``/workspace`` itself is allowed."""
    data: bytes = b""
    """The archive."""
    blob: str | None = None
    """Reference of the archive, instead of ``data``."""
    user: str | None = None
    """Whose the files are; None is the sandbox's user."""


class PutResult(Record, frozen=True, kw_only=True):
    """What was unpacked."""

    path: str
    """Absolute path of the directory."""
    entries: int
    """Files, folders and links made."""
    skipped: int
    """Special files left out."""


class GetRequest(Record, frozen=True, kw_only=True):
    """Pack a directory (verb ``get``, answered by `GetResult`)."""

    sandbox: str
    """The sandbox's id."""
    path: str
    """The directory, as in `PutRequest`."""
    limit: int = 256 << 20
    """Most bytes of the archive; a larger one is an ``output_limit`` error."""


class GetResult(Record, frozen=True, kw_only=True):
    """The archive."""

    data: bytes
    """Its bytes, where they are few; else empty."""
    blob: str | None = None
    """Its reference in the blob store, where it is large."""
    size: int
    """Bytes of the archive."""
    entries: int
    """Files, folders and links in it."""
    skipped: int
    """Special files left out."""


class SnapshotRequest(Record, frozen=True, kw_only=True):
    """Keep the files of a sandbox as they are now (verb ``snapshot``, answered by `SnapshotInfo`).

    Its processes are stopped meanwhile and go on afterwards. They are not part of the snapshot.
    """

    sandbox: str
    """The sandbox's id."""
    snapshot: str
    """Id given by the caller, ``[A-Za-z0-9_-]{1,96}``; taken once for it."""
    ttl_s: float = 3600.0
    """It is dropped this long after it was taken or last forked from."""


class SnapshotInfo(Record, frozen=True, kw_only=True):
    """A snapshot; it lives on the node of its sandbox, and longer than that where it has to."""

    snapshot: str
    """Its id."""
    node: str
    """Its node."""
    sandbox: str
    """Of which sandbox it was taken."""
    size: int
    """Bytes that it takes on the disk."""
    expires_in_s: float
    """Until it is dropped."""


class ForkRequest(Record, frozen=True, kw_only=True):
    """Make sandboxes that begin with the files of a snapshot (verb ``fork``, answered by `ForkResult`).

    Limits, environment and image are those of the sandbox that the snapshot was taken of, which may be gone. Either all
    of them are made or none.
    """

    snapshot: str
    """The snapshot's id."""
    sandboxes: tuple[str, ...]
    """Ids of the new ones, 1 to 64."""
    owner: str
    """Who holds their leases."""
    labels: Mapping[str, str] = {}
    """Of all of them."""
    ttl_s: float = 3600.0
    """As in `SandboxSpec`."""
    idle_ttl_s: float = 1800.0
    """As in `SandboxSpec`."""


class ForkResult(Record, frozen=True, kw_only=True):
    """Where they are."""

    sandboxes: tuple[SandboxRef, ...]
    """In the order asked for."""


class RestoreRequest(Record, frozen=True, kw_only=True):
    """Put the files of a snapshot back into the sandbox that it was taken of or a fork of it (verb ``restore``,
    answered by `SandboxRef`).

    All that runs in it is ended; its id, lease and limits stay.
    """

    sandbox: str
    """The sandbox's id."""
    snapshot: str
    """The snapshot's id."""


class DropRequest(Record, frozen=True, kw_only=True):
    """Forget a snapshot (verb ``drop``, answered by `DropResult`); sandboxes made from it go on."""

    snapshot: str
    """The snapshot's id."""


class DropResult(Record, frozen=True, kw_only=True):
    """After this it cannot be forked from."""

    snapshot: str
    """Its id."""
    existed: bool
    """False where there was none."""
