"""A recorded run, read from the bus for the simulator. Awaits: the broker, within the bounds of `reachable`."""

from pathlib import Path

from opengyre.cli.stack import StackError
from opengyre.cli.stream_read import connected
from opengyre.proto import subjects
from opengyre.proto.host import HostStateChanged, HostStatus
from opengyre.proto.run import RunSpec
from opengyre.proto.traj import Ended
from opengyre.proto.update import Committed
from opengyre.shared.bus import Bucket, Bus, BusError, read
from opengyre.sim.recorded import Recorded, TooLittleRecordedError, recorded


async def load(run: str, nats: str | None, state_dir: Path | None) -> tuple[RunSpec, Recorded]:
    """The run's setting and its workload. Raises `StackError` in one sentence."""
    try:
        async with connected(nats, state_dir) as bus:
            return await _read(bus, run)
    except BusError as error:
        raise StackError(str(error)) from error
    except TooLittleRecordedError as error:
        raise StackError(f"--from: {error}") from error


async def _read(bus: Bus, run: str) -> tuple[RunSpec, Recorded]:
    found = await Bucket(bus, subjects.KV_RUNS, RunSpec).get(run)
    if found is None:
        async with Bucket(bus, subjects.KV_RUNS, RunSpec).view() as runs:
            known = ", ".join(sorted(runs.values)) or "there is none yet"
        raise StackError(f"--from: there is no run {run!r}; allowed: {known}")
    spec = found[0]
    ended = await read(bus, subjects.TRAJ, subjects.traj(run, "*", "*", "ended"))
    commits = await read(bus, subjects.UPDATES, subjects.update(run, "committed"))
    changes = await read(bus, subjects.HOSTS, subjects.host("*", "state"))
    async with Bucket(bus, subjects.KV_HOSTS, HostStatus).view() as hosts:
        there = list(hosts.values.values())
    # Outside the view, which would wrap what is raised.
    return spec, recorded(
        spec,
        [event for stored in ended if isinstance(event := stored.event(), Ended)],
        [event for stored in commits if isinstance(event := stored.event(), Committed)],
        [event for stored in changes if isinstance(event := stored.event(), HostStateChanged)],
        there,
    )
