"""What each service may do on the bus, and the users of a NATS server that say so. Pure.

A service publishes its own events, writes its own buckets, reads the streams that it follows, takes from its own
durable consumers and answers its own requests. Nobody but the bootstrap makes a stream or a durable consumer of one
that is a work queue, and nobody but `operator` deletes a message.

`python -m opengyre.shared.bus.rights` prints the users for a server's configuration; a user's password is the variable
`BUS_<USER>` of the server's environment.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from opengyre.proto import subjects

BUCKETS: Final = (
    subjects.KV_RUNS,
    subjects.KV_LEDGER,
    subjects.KV_HOSTS,
    subjects.KV_DESIRED,
    subjects.KV_SERVICES,
    subjects.KV_LEASES,
    subjects.KV_IDEMPOTENCY,
)
STREAMS: Final = (*subjects.STREAM_SUBJECTS, *(f"KV_{name}" for name in BUCKETS))


@dataclass(frozen=True)
class Rights:
    """Of one service. Patterns are of subjects; streams and buckets by name."""

    publishes: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    """Streams that it reads."""
    sees: tuple[str, ...] = ()
    """Buckets that it reads."""
    puts: Mapping[str, str] = field(default_factory=dict)
    """Bucket -> pattern of the keys that it writes; it reads that bucket too."""
    takes: tuple[tuple[str, str], ...] = ()
    """(stream, durable consumer)."""
    asks: tuple[str, ...] = ()
    """Services that it sends requests to."""
    answers: tuple[str, ...] = ()
    """Services as which it answers requests."""
    deletes: tuple[str, ...] = ()
    """Streams of which it removes messages."""
    discovers: bool = False
    """Whether it looks which services are there."""


def _service(name: str, *, leases: str | None = None, **more: object) -> Rights:
    """Rights of a service, with those that all have: its own status."""
    puts = {subjects.KV_SERVICES: f"{name}.>"}
    if leases is not None:
        puts[subjects.KV_LEASES] = leases
    given = more.pop("puts", {})
    assert isinstance(given, Mapping)
    return Rights(puts={**puts, **given}, **more)  # type: ignore[arg-type]  # the names are those of the fields


RIGHTS: Final[Mapping[str, Rights]] = {
    "gateway": _service(
        "gateway",
        leases="gateway.>",
        publishes=(subjects.task("*", "*", "submitted"),),
        follows=(
            subjects.TASKS,
            subjects.TRAJ,
            subjects.UPDATES,
            subjects.WEIGHTS,
            subjects.DECISIONS,
            subjects.HOSTS,
            subjects.DLQ,
        ),
        sees=(subjects.KV_LEDGER, subjects.KV_HOSTS, subjects.KV_DESIRED),
        puts={subjects.KV_RUNS: ">", subjects.KV_IDEMPOTENCY: ">"},
        asks=("allocator", "trajectory"),
    ),
    "allocator": _service(
        "allocator",
        leases="leader.allocator",
        publishes=(
            subjects.task("*", "*", "admitted"),
            subjects.task("*", "*", "overdue"),
            subjects.episode_dispatch("*"),
            subjects.decision("*"),
            subjects.host("*", "command"),
        ),
        follows=(subjects.TASKS, subjects.TRAJ, subjects.UPDATES, subjects.WEIGHTS, subjects.HOSTS),
        sees=(subjects.KV_RUNS, subjects.KV_HOSTS),
        puts={subjects.KV_LEDGER: ">", subjects.KV_DESIRED: ">"},
        answers=("allocator",),
    ),
    "rollout": _service(
        "rollout",
        publishes=(f"{subjects.PREFIX}.traj.>", subjects.dlq(*subjects.ROLLOUT_EPISODES)),
        follows=(subjects.TRAJ,),
        sees=(subjects.KV_RUNS, subjects.KV_HOSTS),
        takes=(subjects.ROLLOUT_EPISODES,),
        asks=("sandbox",),
        discovers=True,
    ),
    "sandbox": _service("sandbox", answers=("sandbox",)),
    "trajectory": _service(
        "trajectory",
        publishes=(
            subjects.traj("*", "*", subjects.ALL, "overdue"),
            subjects.group_ready("*"),
            subjects.task("*", "*", "scored"),
            subjects.dlq(*subjects.TRAJECTORY_ENDED),
            subjects.dlq(*subjects.TRAJECTORY_OVERDUE),
        ),
        follows=(subjects.TRAJ,),
        takes=(subjects.TRAJECTORY_ENDED, subjects.TRAJECTORY_OVERDUE),
        answers=("trajectory",),
    ),
    "trainer": _service(
        "trainer",
        leases="leader.trainer",
        publishes=(
            subjects.task("*", "*", "consumed"),
            subjects.update("*", "*"),
            subjects.weights("*", "published"),
            subjects.dlq(*subjects.TRAINER_GROUPS),
        ),
        follows=(subjects.TASKS, subjects.UPDATES, subjects.WEIGHTS),
        sees=(subjects.KV_HOSTS,),
        puts={subjects.KV_RUNS: ">"},
        takes=(subjects.TRAINER_GROUPS,),
        answers=("trainer",),
    ),
    "host": _service(
        "host",
        leases="weights.>",
        publishes=(subjects.host("*", "state"), subjects.weights("*", "applied"), subjects.weights("*", "refused")),
        follows=(subjects.WEIGHTS,),
        sees=(subjects.KV_RUNS, subjects.KV_DESIRED),
        puts={subjects.KV_HOSTS: ">"},
        asks=("trainer",),
    ),
    "operator": Rights(
        # Dead letters go back to where they came from.
        publishes=(f"{subjects.PREFIX}.>", "$JS.API.INFO", "$JS.API.STREAM.LIST"),
        follows=tuple(subjects.STREAM_SUBJECTS),
        sees=BUCKETS,
        asks=("allocator", "sandbox", "trainer", "trajectory"),
        deletes=tuple(subjects.STREAM_SUBJECTS),
        discovers=True,
    ),
}


def publishing(rights: Rights) -> list[str]:
    """Every subject that a client with these rights may send to."""
    found = [*rights.publishes]
    found += [f"$KV.{bucket}.{keys}" for bucket, keys in rights.puts.items()]
    found += [subjects.rpc(service, "*", "*") for service in rights.asks]
    if rights.discovers:
        found.append("$SRV.PING")
    if rights.answers:
        # Not `allow_responses`: a broker forgets what was asked through another one, which has died since.
        found.append("_INBOX.>")
    buckets = dict.fromkeys([*rights.sees, *rights.puts])
    read = [*rights.follows, *(f"KV_{bucket}" for bucket in buckets)]
    # The client asks which stream a subject is in.
    found.append("$JS.API.STREAM.NAMES")
    for stream in read:
        found += [
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.STREAM.MSG.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}.>",
            f"$JS.API.CONSUMER.INFO.{stream}.*",
        ]
        if stream in (subjects.EPISODES, subjects.GROUPS):  # work queues take no second reader
            continue
        found += [
            f"$JS.API.CONSUMER.CREATE.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}.>",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
            f"$JS.API.CONSUMER.DELETE.{stream}.*",
            f"$JS.FC.{stream}.>",
        ]
    for stream, consumer in rights.takes:
        found += [
            f"$JS.API.CONSUMER.INFO.{stream}.{consumer}",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
            f"$JS.ACK.{stream}.{consumer}.>",
        ]
    found += [f"$JS.API.STREAM.MSG.DELETE.{stream}" for stream in rights.deletes]
    return list(dict.fromkeys(found))


def subscribing(rights: Rights) -> list[str]:
    """Every subject that such a client may listen on."""
    found = ["_INBOX.>"]
    found += [subjects.rpc(service, "*", "*") for service in rights.answers]
    if rights.answers:
        found.append("$SRV.>")
    return found


def _strings(patterns: Sequence[str]) -> str:
    words = [f'"{one}"' for one in patterns]
    lines = textwrap.wrap(", ".join(words), 108, break_long_words=False, break_on_hyphens=False)
    return "[\n" + "".join(f"          {line}\n" for line in lines) + "        ]"


def users() -> str:
    """`authorization { ... }` of a server's configuration."""
    everything = ["$JS.API.INFO", "$JS.API.STREAM.>", "$JS.API.CONSUMER.>"]
    blocks = [_user("bootstrap", everything, ["_INBOX.>"])]
    blocks += [_user(name, publishing(rights), subscribing(rights)) for name, rights in RIGHTS.items()]
    return (
        "# Written by `python -m opengyre.shared.bus.rights`: what each service may do.\n"
        "authorization {\n  users: [\n" + "".join(blocks) + "  ]\n}\n"
    )


def _user(name: str, publish: Sequence[str], subscribe: Sequence[str]) -> str:
    return (
        f"    {{\n      user: {name}\n      password: $BUS_{name.upper()}\n      permissions: {{\n"
        f"        publish: {_strings(publish)}\n        subscribe: {_strings(subscribe)}\n      }}\n    }}\n"
    )


if __name__ == "__main__":
    print(users(), end="")
