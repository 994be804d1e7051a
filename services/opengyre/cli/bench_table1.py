"""Rows of Table 1 on the real services and a real NATS, with emulated engines on fast time.

Each row is a stack of its own in a fresh directory, on the same seed, so every row meets the same episodes. The run
goes on past the last update that is measured, as in the middle of a longer run; time is from the first admission to
that update's commit, on this process's clock, times the scale.

Awaits: the stack's readiness (its own bound), the hosts' first weights and each event of the run (`STALL_S`).
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opengyre.cli.bench_facts import RunFacts, gather
from opengyre.cli.demo_client import Api, ApiError
from opengyre.cli.supervisor_child import tail
from opengyre.cli.up import Options, running
from opengyre.proto import subjects
from opengyre.proto.host import HostState, HostStatus
from opengyre.proto.run import Dispatch, Harness, RunSpec
from opengyre.proto.task import Check, TaskAdmitted, TaskSpec
from opengyre.proto.update import Committed
from opengyre.shared.bus import Bucket, Bus, follow
from opengyre.shared.settings import Settings
from opengyre.sim.gyre import HOUR_S
from opengyre.sim.table1 import ROWS
from opengyre.sim.workload import PAPER, Workload

STALL_S = 120.0
TURNS = 4
TOKENS = 400
"""Mean of an execution: a token is then well below the time that a switch takes."""
RUN = "bench"
SETTLED = (HostState.ROLLOUT, HostState.TRAIN)


@dataclass(frozen=True, slots=True)
class Bench:
    time_scale: float
    updates: int = 12
    seed: int = 0
    processes: int = 1
    """That the emulated hosts share."""
    workload: Workload = PAPER
    keep: Path | None = None
    """Keep the state of each row below this directory."""

    def environment(self) -> dict[str, str]:
        """The services' settings."""
        load = self.workload
        per_execution_h = 1 / load.train_rate
        host = {
            "CAPACITY": load.capacity,
            "TOKENS_PER_S": TOKENS / (load.mean_h * HOUR_S),
            "SWITCH_S": load.switch_h * HOUR_S,
            "TRAIN_S_PER_EXECUTION": per_execution_h * HOUR_S,
            "TIME_SCALE": self.time_scale,
        }
        most = 8 * load.update_executions
        return {
            **{f"GYRE_HOST__{name}": repr(float(value)) for name, value in host.items()},
            "GYRE_ROLLOUT__MAX_EPISODES": str(most),
            "GYRE_LOG__LEVEL": "warning",
        }

    def spec(self, row: str, model: Path) -> RunSpec:
        """The row's setting with the workload's B and G."""
        setting = ROWS[row].setting
        load = self.workload
        return RunSpec(
            run=RUN,
            model=str(model),
            seed=self.seed,
            dispatch=Dispatch(
                phi=setting.dispatch.phi, mu=setting.dispatch.mu, close_at=setting.dispatch.close_at,
                batch_groups=load.batch_groups, group_size=load.group_size, min_members=1,
            ),
            harness=Harness(
                agent="synthetic", max_turns=TURNS, synthetic_turns=TURNS, synthetic_tokens=TOKENS,
                synthetic_sigma=load.sigma, synthetic_shared=load.shared, max_tokens=100_000,
                context_tokens=1_000_000, time_budget_s=86_400,
            ),
            elastic=msgspec.structs.replace(
                setting.elastic, switch_s=load.switch_h * HOUR_S / self.time_scale, grain=1
            ),
        )  # fmt: skip

    def task(self) -> TaskSpec:
        """One task, made into more groups than the run can take."""
        return TaskSpec(
            task="load",
            instruction="go on",
            checks=(Check(name="synthetic", command="true", weight=1.0),),
            repeat=(self.updates + 16) * self.workload.batch_groups,
        )


class BenchError(Exception):
    """A row cannot be measured; one sentence."""


async def make_model(directory: Path) -> None:
    """A model of a few thousand parameters: everything around it is as it is for a large one."""
    await asyncio.to_thread(_make_model, directory)


def _make_model(directory: Path) -> None:
    from opengyre.tiny.checkpoint import save_pretrained
    from opengyre.tiny.config import TinyConfig
    from opengyre.tiny.model import TinyModel
    from opengyre.tiny.tokenizer import TinyTokenizer

    tokenizer = TinyTokenizer.train(["go on"], 320)
    config = TinyConfig(
        tokenizer.vocab_size, 16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1,
        max_position_embeddings=1_000_000, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.end_id,
    )  # fmt: skip
    directory.mkdir(parents=True)
    tokenizer.save(directory)
    save_pretrained(TinyModel(config, 0), directory)


async def measure(row: str, bench: Bench, settings: Settings, report: Callable[[str], None]) -> RunFacts:
    """Run one row. Raises `BenchError` or `StackError`."""
    folder = Path(tempfile.mkdtemp(prefix=f"gyre-bench-{row}-", dir=bench.keep))
    try:
        model = folder / "model"
        await make_model(model)
        options = Options(
            folder / "state", bench.workload.cells, engine="emulated", host_processes=bench.processes,
            environment=bench.environment(),
        )  # fmt: skip
        async with running(options, settings, report) as run:
            lacking = await run.wait_ready()
            if lacking:
                raise BenchError("not everything runs: " + "; ".join(f"{n}: {why}" for n, why in lacking.items()))
            try:
                async with Bus(run.stack.nats, "bench") as bus, Api(run.stack.gateway, run.stack.api_key) as api:
                    return await _row(row, bench, bus, api, model, report)
            except (ApiError, BenchError) as error:
                said = [line for child in run.supervisor.children.values() for line in tail(child.log, 1)]
                raise BenchError(f"{row}: {error}; the services' last words: {' / '.join(said)}") from error
    finally:
        if bench.keep is None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _row(row: str, bench: Bench, bus: Bus, api: Api, model: Path, report: Callable[[str], None]) -> RunFacts:
    spec = bench.spec(row, model)
    document = msgspec.to_builtins(spec)
    del document["state"]
    await api.post("/v1/runs", document)
    await _all_settled(bus, bench.workload.cells)
    happened: asyncio.Queue[TaskAdmitted | Committed] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        readers = [
            group.create_task(_read(bus, subjects.TASKS, subjects.task(RUN, "*", "admitted"), happened)),
            group.create_task(_read(bus, subjects.UPDATES, subjects.update(RUN, "committed"), happened)),
        ]
        await api.post("/v1/tasks", {"run": RUN, "tasks": [bench.task()]})
        hours = await _hours(row, bench, happened, report)
        for reader in readers:
            reader.cancel()
    if len(hours) < bench.updates:
        raise BenchError(f"nothing was admitted or committed for {STALL_S:g} s after {len(hours)} updates")
    return await gather(row, bench.updates, spec, hours, bench.workload, bench.time_scale, bus, api)


async def _all_settled(bus: Bus, cells: int) -> None:
    """Until every host has the first weights and its role: what a start costs is no part of a row."""
    async with Bucket(bus, subjects.KV_HOSTS, HostStatus).view() as hosts:
        try:
            async with asyncio.timeout(STALL_S):
                while sum(status.state in SETTLED for status in hosts.values.values()) < cells:
                    await hosts.changed(1.0)
        except TimeoutError as error:
            raise BenchError(f"not all of {cells} hosts are in a role after {STALL_S:g} s") from error


async def _hours(
    row: str, bench: Bench, happened: "asyncio.Queue[TaskAdmitted | Committed]", report: Callable[[str], None]
) -> list[float]:
    """Emulated hours from the first admission to each commit; fewer than wished where nothing comes any more."""
    loop = asyncio.get_running_loop()
    began: float | None = None
    hours: list[float] = []
    while len(hours) < bench.updates:
        try:
            async with asyncio.timeout(STALL_S):
                event = await happened.get()
        except TimeoutError:
            break
        if isinstance(event, TaskAdmitted):
            began = loop.time() if began is None else began
        elif began is not None:
            hours.append((loop.time() - began) * bench.time_scale / HOUR_S)
            report(f"{row}: update {event.version} of {bench.updates} at {hours[-1]:.2f} h")
    return hours


async def _read(bus: Bus, stream: str, subject: str, into: "asyncio.Queue[TaskAdmitted | Committed]") -> None:
    async for stored in follow(bus, stream, subject):
        if isinstance(event := stored.event(), TaskAdmitted | Committed):
            into.put_nowait(event)
