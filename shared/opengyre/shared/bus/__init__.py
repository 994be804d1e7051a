"""The bus: the only package that knows nats-py. Each rule in it answers a measured behaviour of client or server."""

from opengyre.shared.bus.buckets import Bucket, Lease, LeaseOwner, View
from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.consume import Delivery, Puller, pulling, work
from opengyre.shared.bus.discover import discover
from opengyre.shared.bus.errors import (
    Abandoned,
    BusError,
    BusUnavailableError,
    ConflictError,
    DriftError,
    FencedError,
    NotBootstrappedError,
    QueueFullError,
    Rejected,
    RetryLater,
    RpcFailedError,
    RpcUnavailableError,
    TooLargeError,
)
from opengyre.shared.bus.pages import Page, count, message_at, next_message, page, reachable, remove
from opengyre.shared.bus.replay import follow, read
from opengyre.shared.bus.rpc import Endpoint, call, serving
from opengyre.shared.bus.stored import Stored
from opengyre.shared.bus.topology import bootstrap

__all__ = [
    "Abandoned",
    "Bucket",
    "Bus",
    "BusError",
    "BusUnavailableError",
    "ConflictError",
    "Delivery",
    "DriftError",
    "Endpoint",
    "FencedError",
    "Lease",
    "LeaseOwner",
    "NotBootstrappedError",
    "Page",
    "Puller",
    "QueueFullError",
    "Rejected",
    "RetryLater",
    "RpcFailedError",
    "RpcUnavailableError",
    "Stored",
    "TooLargeError",
    "View",
    "bootstrap",
    "call",
    "count",
    "discover",
    "follow",
    "message_at",
    "next_message",
    "page",
    "pulling",
    "reachable",
    "read",
    "remove",
    "serving",
    "work",
]
