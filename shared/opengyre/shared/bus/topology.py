"""Every stream, consumer and bucket, in one place. The bootstrap makes what is missing and fails on drift.

Services only bind. `python -m opengyre.shared.bus.bootstrap` is the step that runs before them.
"""

import dataclasses
from typing import Any

from nats.js import errors as js_errors
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
)

from opengyre.proto import subjects
from opengyre.shared.bus.connection import Bus
from opengyre.shared.bus.errors import BusError, DriftError

DAY = 86_400.0
API_LEVEL = 1
"""The server's JetStream API level that we need: 1 is nats-server 2.11, with a time to live for each message."""


def streams(replicas: int = 1) -> list[StreamConfig]:
    """The streams of design section 3, and the buckets."""

    def log_stream(name: str, **more: Any) -> StreamConfig:
        return StreamConfig(
            name=name,
            subjects=list(subjects.STREAM_SUBJECTS[name]),
            storage=StorageType.FILE,
            compression=StoreCompression.S2,
            num_replicas=replicas,
            duplicate_window=120,
            **{"retention": RetentionPolicy.LIMITS, "discard": DiscardPolicy.OLD, "allow_direct": True, **more},
        )

    queue: dict[str, Any] = {"retention": RetentionPolicy.WORK_QUEUE, "discard": DiscardPolicy.NEW}
    return [
        log_stream(subjects.TASKS, max_age=90 * DAY),
        log_stream(subjects.EPISODES, **queue, max_msgs=1_000_000),
        log_stream(subjects.TRAJ, max_age=30 * DAY, deny_delete=True),
        log_stream(subjects.GROUPS, **queue, max_msgs=1_000_000),
        log_stream(subjects.UPDATES, max_age=90 * DAY),
        log_stream(subjects.WEIGHTS, max_age=90 * DAY),
        log_stream(subjects.DECISIONS, max_age=90 * DAY),
        log_stream(subjects.HOSTS, max_age=90 * DAY, max_msgs_per_subject=10_000),
        log_stream(subjects.DLQ, max_age=30 * DAY),
        log_stream(subjects.ADVISORY, max_age=7 * DAY),
        bucket(subjects.KV_RUNS, replicas),
        bucket(subjects.KV_LEDGER, replicas),
        bucket(subjects.KV_HOSTS, replicas, marker_s=60),
        bucket(subjects.KV_DESIRED, replicas),
        bucket(subjects.KV_SERVICES, replicas, marker_s=60),
        bucket(subjects.KV_LEASES, replicas, marker_s=60),
        bucket(subjects.KV_IDEMPOTENCY, replicas, max_age=DAY),
    ]


def bucket(name: str, replicas: int, marker_s: float | None = None, max_age: float | None = None) -> StreamConfig:
    """A KV bucket as the stream that it is, history 1; with `marker_s`, watchers see keys expire."""
    return StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
        deny_delete=True,
        num_replicas=replicas,
        duplicate_window=120,
        max_age=max_age,
        subject_delete_marker_ttl=marker_s,
    )


def consumers() -> list[tuple[str, ConsumerConfig]]:
    """The durable consumers. `ack_wait` survives several missed `in_progress` beats (one every 4 s).

    The server never gives a message up by itself (`max_deliver` -1): it would do so silently, and giving back a message
    is no failure. `work` counts failures and keeps what it gives up as a dead letter.
    """

    def durable(name: str, **more: Any) -> ConsumerConfig:
        return ConsumerConfig(
            durable_name=name,
            ack_policy=AckPolicy.EXPLICIT,
            deliver_policy=DeliverPolicy.ALL,
            ack_wait=15,
            max_deliver=-1,
            **{"max_ack_pending": 100_000, "max_waiting": 512, **more},
        )

    return [
        (subjects.EPISODES, durable("rollout")),
        (subjects.GROUPS, durable("trainer")),
        (subjects.TRAJ, durable("trajectory", filter_subject=subjects.traj("*", "*", "*", "ended"))),
        (subjects.TASKS, durable("trajectory", filter_subject=subjects.task("*", "*", "overdue"))),
    ]


async def bootstrap(bus: Bus, replicas: int = 1) -> list[str]:
    """Make what is missing, check what is there; return the names of what was made. Raises `DriftError`."""
    info = await bus.ask(bus.js.account_info)
    if not info.api.level or info.api.level < API_LEVEL:
        raise BusError("the NATS server is too old: 2.11 or newer is needed (JetStream API level 1)")
    made: list[str] = []
    for config in streams(replicas):
        assert config.name is not None
        try:
            there = (await bus.stream_info(config.name)).config
        except js_errors.NotFoundError:
            await bus.ask(lambda config=config: bus.js.add_stream(config))
            made.append(config.name)
        else:
            _check(f"stream {config.name}", config, there)
    for stream, config in consumers():
        assert config.durable_name is not None
        try:
            existing = await _consumer(bus, stream, config.durable_name)
        except js_errors.NotFoundError:
            await bus.ask(lambda stream=stream, config=config: bus.js.add_consumer(stream, config))
            made.append(f"{stream}/{config.durable_name}")
        else:
            _check(f"consumer {stream}/{config.durable_name}", config, existing)
    return made


async def _consumer(bus: Bus, stream: str, name: str) -> ConsumerConfig:
    return (await bus.ask(lambda: bus.js.consumer_info(stream, name))).config


def _check(what: str, wanted: Any, there: Any) -> None:
    for field in dataclasses.fields(wanted):
        ours, theirs = getattr(wanted, field.name), getattr(there, field.name)
        if ours is None or ours == theirs or (isinstance(ours, list) and sorted(ours) == sorted(theirs or [])):
            continue
        if isinstance(ours, float) and isinstance(theirs, int | float) and abs(ours - theirs) < 1e-6:
            continue
        raise DriftError(f"{what}: {field.name} is {theirs!r}, our definition says {ours!r}; migrate it by hand")
