"""A gateway on a real socket, and an allocator that answers what a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from opengyre.gateway.service import Gateway
from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.decision import (
    AdmissionInput,
    Book,
    CellReport,
    CellsReport,
    Discards,
    StalenessReport,
    StalenessRequest,
    WishReply,
    WishRequest,
)
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.ids import group_of, run_of
from opengyre.proto.run import Dispatch, Harness
from opengyre.proto.service import Empty
from opengyre.proto.task import TaskSpec
from opengyre.proto.traj import Call, Ended, Part, Started, ToolResult, Verified, VersionSpan
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bus, Endpoint, RpcFailedError, serving
from opengyre.shared.http import listen, probe_routes, serving_http
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import Settings
from support import eventually


class Running:
    """A gateway that answers at `url`."""

    def __init__(self, context: Context, gateway: Gateway, url: str, client: httpx.AsyncClient) -> None:
        self.context = context
        self.gateway = gateway
        self.url = url
        self.client = client

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.request(method, path, json=body, headers=sent)

    async def refused(self, status: int, method: str, path: str, body: Any = None, **headers: str) -> str:
        """The sentence of an answer that must be a problem of this status."""
        answer = await self.ask(method, path, body, **headers)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        document = answer.json()
        assert document["status"] == status
        return document["detail"]

    async def given(self, status: int, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON of an answer that must have this status."""
        answer = await self.ask(method, path, body, **headers)
        assert answer.status_code == status, answer.text
        return answer.json()


@contextlib.asynccontextmanager
async def gateway_on(bus: Bus, folder: Path, **gateway: Any) -> AsyncIterator[Running]:
    """Start a gateway on `bus` as its lifecycle does."""
    settings = Settings.model_validate({"gateway": gateway, "state_dir": folder})
    sock = listen(settings.http)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with Blobs(folder / "blobs", settings.cache) as blobs:
        context = Context("gateway", "test", settings, bus, blobs, url)
        service = Gateway(context)
        app = service.app(probe_routes(lambda: True, lambda: context.missing))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run())
            async with (
                serving_http(sock, app),
                httpx.AsyncClient(base_url=url, timeout=90, limits=httpx.Limits(max_keepalive_connections=0)) as client,
            ):
                await eventually(lambda: context.missing is None)
                try:
                    yield Running(context, service, url, client)
                finally:
                    context.stopping.set()
            await running


def book(**figures: int) -> Book:
    dropped = {"infra": figures.pop("dropped", 0)}
    values = {"trained": 0, "ready": 0, "live": 0, **figures}
    return Book(dropped=dropped, dispatched=sum(values.values()) + dropped["infra"], balances=True, **values)


class FakeAllocator:
    """Answers like the allocator for one run and one cell."""

    def __init__(self, run: str, cell: str = "host0") -> None:
        self.run = run
        self.cell = cell
        self.wishes: list[WishRequest] = []

    async def staleness(self, request: StalenessRequest) -> StalenessReport:
        if request.run != self.run:
            raise RpcFailedError("not_found", f"there is no run {request.run}; there are: {self.run}")
        return StalenessReport(
            run=self.run, phi=0.5, mu=2, predicted=1.0, mean=1.1, maximum=2, distribution={0: 1, 2: 3},
            window_mean=1.0, window=4, published_version=4, trainer_version=5, groups=book(trained=4, ready=1, live=2),
            executions=book(trained=32, ready=8, live=16), by_execution_mean=1.2, by_execution_maximum=4,
            by_execution={0: 8, 2: 22, 4: 2}, by_token_mean=0.9, trained_mean_tokens=50.0,
            discards={"stale": Discards(executions=3, mean_tokens=80.0)}, live_executions=16,
            admission=AdmissionInput(
                dispatch=Dispatch(), updates=None, state="active", finished=False, published=4,
                kept_executions=52 * 8, unconsumed_executions=20 * 8, waiting=3, most=64,
            ),
        )  # fmt: skip

    async def cells(self, _request: Empty) -> CellsReport:
        return CellsReport(
            cells=(CellReport(cell=self.cell, hosts=(self.cell,), state="rollout", role="rollout", wish=None),)
        )

    async def wish(self, request: WishRequest) -> WishReply:
        if request.cell != self.cell:
            raise RpcFailedError("not_found", f"there is no cell {request.cell}; there are: {self.cell}")
        self.wishes.append(request)
        return WishReply(cell=request.cell, wish=request.wish, state="rollout")

    @contextlib.asynccontextmanager
    async def answering(self, bus: Bus) -> AsyncIterator["FakeAllocator"]:
        endpoints = {
            "staleness": Endpoint(StalenessRequest, self.staleness),
            "cells": Endpoint(Empty, self.cells),
            "wish": Endpoint(WishRequest, self.wish),
        }
        async with serving(bus, "allocator", "any", endpoints):
            yield self


def log_of(execution: str, members: tuple[str, ...], task: TaskSpec, value: float = 1.0) -> list[tuple[str, Event]]:
    """Subject and event of each entry of a short log: one call, one command, a verdict."""
    run, group = run_of(execution), group_of(execution)
    ids: dict[str, Any] = {"run": run, "group": group, "execution": execution, "attempt": 0}
    dispatch = EpisodeDispatch(
        run=run, group=group, execution=execution, members=members, version=0, seed=1, task=task, harness=Harness(),
        min_members=2,
    )  # fmt: skip
    log: list[tuple[str, Event]] = [
        ("started", Started(**ids, index=0, dispatch=dispatch, replica="r")),
        ("call", Call(
            **ids, index=1, call="c0", turn=0, request_digest="d", parent=None, prefix_tokens=0, prompt_ids=(1, 2, 3),
            sampled_ids=(4, 5), logprobs=(-0.1, -0.2), versions=(VersionSpan(version=0, start=0, end=2),),
            temperature=1.0, finish_reason="stop", text="echo hello", hosts=("host0",),
        )),
        ("tool", ToolResult(
            **ids, index=2, turn=0, exec_id="x", command="echo hello", exit_code=0, output="hello", output_bytes=6,
            timed_out=False,
        )),
        ("verified", Verified(**ids, index=3, parts=(Part(name="a", weight=1.0, value=value),))),
        ("ended", Ended(**ids, index=4, reason="done", turns=1, sampled_tokens=2, duration_s=0.5, members=members)),
    ]  # fmt: skip
    return [(subjects.traj(run, group, execution, kind), event) for kind, event in log]


async def spoil(bus: Bus, execution: str, task: str) -> None:
    """Put messages that are no events under each subject of an execution, its task, its run and the dead letters."""
    run, group = run_of(execution), group_of(execution)
    spoilt = [
        *(subjects.traj(run, group, execution, kind) for kind in ("started", "call", "verified", "ended")),
        *(subjects.task(run, task, kind) for kind in ("admitted", "scored", "consumed")),
        subjects.task(run, "unreadable", "submitted"), subjects.update(run, "committed"),
        *(subjects.weights(run, kind) for kind in ("published", "applied", "refused")),
        subjects.decision(run), subjects.dlq("TRAJ", "trajectory"),
    ]  # fmt: skip
    for subject in spoilt:
        await bus.publish_raw(subject, b'{"type":"traj.call.v1"}', f"no-event-1-{subject}", "x")
        await bus.publish_raw(subject, b'{"type":"traj.call.v1","a":' + b"[" * 5000, f"no-event-2-{subject}", "x")
