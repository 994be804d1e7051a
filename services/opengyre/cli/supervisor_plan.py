"""What a stack consists of: the programs with their commands, environments, readiness and order of stopping. Pure."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SERVICES = ("sandbox", "gateway", "allocator", "trajectory", "trainer", "rollout")
"""Those that run once; a stack has one `host` for each of its hosts beside them."""

STOP_SERVICE_S = 25.0
"""The lifecycle of a service needs 20 s at most to finish or hand over; above that it is killed."""

MARK = "OPENGYRE_STACK"
"""In the environment of every process of a stack: the stack's directory, by which it is known as ours."""

STAGE = {"gateway": 0, "sandbox": 2, "valkey": 3, "nats": 4}
"""Order of stopping, everything else being 1: no new requests, then the work, then what the work stands on."""


@dataclass(frozen=True)
class Program:
    name: str
    """Also of its log: `<state>/logs/<name>.log`."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of the supervisor."""
    ready: Literal["port", "status"] = "status"
    """When it is ready: its port accepts connections, or its status says so in the bucket of services."""
    port: int = 0
    stop_s: float = STOP_SERVICE_S
    """Bound of an orderly end."""

    @property
    def stage(self) -> int:
        return STAGE.get(self.name, 1)


@dataclass(frozen=True)
class Addresses:
    """How the services find each other."""

    nats: str
    valkey: str | None
    gateway_port: int
    api_key: str | None
    state_dir: Path
    """Absolute."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further settings of all services, as environment variables."""


EngineName = Literal["tiny", "vllm", "emulated"]


@dataclass(frozen=True)
class Fleet:
    """The hosts of a stack."""

    hosts: int = 2
    engine: EngineName = "tiny"
    processes: int = 1
    """Of the emulated engine, whose hosts share processes; others always have their own."""
    gpus: Sequence[str] = ()
    """CUDA_VISIBLE_DEVICES of each host; none: each has that of the supervisor."""

    def shares(self) -> list[int]:
        """How many hosts each process holds; they differ by one at most."""
        processes = min(self.processes, self.hosts) if self.engine == "emulated" else self.hosts
        return [self.hosts // processes + (n < self.hosts % processes) for n in range(processes)]


def services(addresses: Addresses, fleet: Fleet) -> tuple[Program, ...]:
    """The seven services; the processes of hosts are named host0, host1, ..., as are hosts that have one each."""
    common = {
        **addresses.settings,
        "GYRE_BUS__URL": addresses.nats,
        "GYRE_STATE_DIR": str(addresses.state_dir),
        MARK: str(addresses.state_dir),
        "GYRE_HTTP__PORT": "0",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if addresses.valkey:
        common["GYRE_CACHE__URL"] = addresses.valkey

    def service(name: str, module: str, **more: str) -> Program:
        return Program(name, (sys.executable, "-m", f"opengyre.{module}"), {**common, **more})

    gateway = {"GYRE_HTTP__PORT": str(addresses.gateway_port)}
    if addresses.api_key:
        gateway["GYRE_GATEWAY__API_KEYS"] = json.dumps([addresses.api_key])  # it may hold a comma
    once = tuple(service(name, name, **(gateway if name == "gateway" else {})) for name in SERVICES)
    hosts = (
        service(
            f"host{n}",
            "host",
            GYRE_HOST__HOST=f"host{n}",
            GYRE_HOST__ENGINE=fleet.engine,
            GYRE_HOST__COUNT=str(share),
            **({"CUDA_VISIBLE_DEVICES": fleet.gpus[n]} if fleet.gpus else {}),
        )
        for n, share in enumerate(fleet.shares())
    )
    return (*once, *hosts)


def stages(programs: Sequence[Program]) -> list[list[Program]]:
    """The programs in their order of stopping; those of one stage are stopped together."""
    numbers = sorted({program.stage for program in programs})
    return [[program for program in programs if program.stage == number] for number in numbers]
