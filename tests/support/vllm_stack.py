"""Two hosts of vLLM under the supervisor, a rollout service before them, and executions whose agents a test plays."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from opengyre.cli.supervisor import Supervisor
from opengyre.cli.supervisor_plan import Program
from opengyre.proto import subjects
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import DesiredRole, HostState, HostStateChanged, HostStatus
from opengyre.proto.sandbox import ExecRequest, ExecResult
from opengyre.proto.traj import Call
from opengyre.proto.weights import WeightsPublished
from opengyre.rollout.endpoint import Endpoints, load_secret
from opengyre.shared import embedded
from opengyre.shared.bus import Bucket, Bus, View, bootstrap, read
from opengyre.tiny.model import TinyModel
from opengyre.trees.calls import Given
from opengyre.trees.tree import Tree, build
from opengyre.weights.write import version_directory, write_version
from support import eventually
from support.rollout_fakes import FakeSandboxes, Stack, dispatch
from support.vllm_policy import CONTEXT, tensors

HOSTS = ("host0", "host1")
START_S = 240.0
"""Two starts beside each other, on a machine that does other things as well."""


class Waiting(FakeSandboxes):
    """A node whose programs run until they are told that it is over."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.over = asyncio.Event()

    async def _run(self, request: ExecRequest) -> ExecResult:
        self.ran.append(request.exec_id)
        await self.over.wait()
        return ExecResult(
            exec_id=request.exec_id, exit_code=0, stdout="", stderr="", stdout_bytes=0, stderr_bytes=0,
            stdout_truncated=False, stderr_truncated=False, timed_out=False, duration_s=0.0, isolated=True,
        )  # fmt: skip


@dataclass
class Heard:
    """What a client that streams was told, so far."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """As the client sends it back."""
        made = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in self.calls.values()
        ]
        return {"role": "assistant", "content": self.text or None, **({"tool_calls": made} if made else {})}


@dataclass
class Agent:
    """An execution, and the stock client of its endpoint."""

    stack: "VllmStack"
    episode: EpisodeDispatch
    client: openai.AsyncOpenAI

    async def calls(self) -> list[Call]:
        return [event for event in await self.stack.log(self.episode) if isinstance(event, Call)]

    async def ask(self, messages: list[Any], heard: Heard | None = None, **more: Any) -> Heard:
        """One streamed answer; `heard` grows with it."""
        heard = Heard() if heard is None else heard
        stream = await self.client.chat.completions.create(model="r", messages=messages, stream=True, **more)
        async for chunk in stream:
            for choice in chunk.choices:
                heard.text += choice.delta.content or ""
                heard.finish = choice.finish_reason or heard.finish
                for delta in choice.delta.tool_calls or ():
                    made = heard.calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                    made["id"] += delta.id or ""
                    made["name"] += (delta.function and delta.function.name) or ""
                    made["arguments"] += (delta.function and delta.function.arguments) or ""
        return heard


class VllmStack(Stack):
    """`models`: policies of one shape, by name; whose weights are served is said by `serve`."""

    def __init__(self, bus: Bus, folder: Path, url: str, directory: Path, models: Mapping[str, TinyModel]) -> None:
        super().__init__(bus, folder, url)
        self.model = directory
        self.models = models
        self.version = -1
        self._number = 0
        self.supervisor: Supervisor
        self.statuses: View[HostStatus]
        self.desired = Bucket(bus, subjects.KV_DESIRED, DesiredRole)
        self._epoch = 0

    # Hosts.

    @contextlib.asynccontextmanager
    async def hosts(self, supervisor: Supervisor) -> AsyncIterator["VllmStack"]:
        """Started; they have nothing to serve before `serve`."""
        self.supervisor = supervisor
        common = {
            "GYRE_STATE_DIR": str(self.folder / "state"),
            "GYRE_BUS__URL": self.nats_url,
            "GYRE_HOST__ENGINE": "vllm",
            "GYRE_HOST__VLLM_CONTEXT": str(CONTEXT),
            "GYRE_HOST__DRY_SWITCH": "false",
            "GYRE_HOST__HEARTBEAT_S": "0.2",
            "GYRE_HOST__CAPACITY": "8",
            "OMP_NUM_THREADS": "1",
        }
        supervisor.start(
            Program(name, (sys.executable, "-m", "opengyre.host"), {**common, "GYRE_HOST__HOST": name})
            for name in HOSTS
        )
        async with Bucket(self.bus, subjects.KV_HOSTS, HostStatus).view() as statuses:
            self.statuses = statuses
            yield self

    async def serve(self, name: str) -> TinyModel:
        """Have both hosts serve the weights of this model, as a new version; return it."""
        self.version += 1
        manifest = await asyncio.to_thread(
            write_version,
            tensors(self.models[name]), version_directory(self.folder / "state" / "weights" / "r", self.version),
            run="r", version=self.version, parent=self.version - 1 if self.version else None, step=self.version,
            extra={"config.json": (self.model / "config.json").read_bytes(),
                   "tokenizer.json": (self.model / "tokenizer.json").read_bytes()},
        )  # fmt: skip
        await self.bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))
        for host in HOSTS:
            await self.tell(host, "rollout")
        await self.serving(*HOSTS)
        return self.models[name]

    async def serving(self, *hosts: str) -> None:
        def there() -> bool:
            found = [self.statuses.values.get(host) for host in hosts]
            return all(s is not None and (s.state, s.version) == (HostState.ROLLOUT, self.version) for s in found)

        await eventually(there, START_S, found=self.situation)

    def situation(self, *heard: "Heard") -> str:
        """For who waits in vain: what hosts say of themselves, how far calls have come, and what was logged last."""
        lines = [f"calls of {[len(one.text) for one in heard]} characters, ended by {[one.finish for one in heard]}"]
        for host in HOSTS:
            log = (self.folder / "logs" / f"{host}.log").read_text(errors="replace").splitlines()
            kept = [line for line in log if "does not answer" not in line]  # no trainer is there to be asked
            lines += [str(self.statuses.values.get(host, f"{host} is LOST")), *kept[-8:]]
        return "\n".join(lines)

    async def tell(self, host: str, role: str) -> None:
        self._epoch += 1
        told = DesiredRole(host=host, role=role, epoch=self._epoch, grace_s=0.0)  # type: ignore[arg-type]  # a role
        await self.desired.put(host, told)

    async def changes(self, host: str) -> list[HostStateChanged]:
        stored = await read(self.bus, subjects.HOSTS, subjects.host(host, "state"))
        return [event for event in (one.event() for one in stored) if isinstance(event, HostStateChanged)]

    def running(self, host: str) -> int:
        """Its calls in flight; none while it is LOST."""
        status = self.statuses.values.get(host)
        return 0 if status is None else status.running

    def busy(self) -> str:
        """The host that has calls."""
        return next(name for name, status in self.statuses.values.items() if status.running)

    def engine(self, host: str) -> dict[int, str]:
        """The processes of a host's vLLM: pid -> what it calls itself. The first is the server."""
        pid = self.supervisor.children[host].pid
        return dict(_below(pid)) if pid is not None else {}

    def kill(self, host: str, title: str) -> None:
        """kill -9 of the process of its vLLM that has this in its name."""
        found = [pid for pid, name in self.engine(host).items() if title in name]
        assert len(found) == 1, (title, self.engine(host))
        os.kill(found[0], signal.SIGKILL)

    # Executions.

    @contextlib.asynccontextmanager
    async def agent(self, service: str, sandboxes: Waiting, **harness: Any) -> AsyncIterator[Agent]:
        """An execution whose program waits, and a client for it."""
        self._number += 1
        fields: dict[str, Any] = {"max_turns": 40, "max_tokens": 200, "context_tokens": CONTEXT, "streams": "live"}
        episode = dispatch(
            number=self._number, agent="program", program="wait", time_budget_s=600.0, **{**fields, **harness}
        )
        before = len(sandboxes.ran)
        await self.submit(episode)
        await eventually(lambda: len(sandboxes.ran) > before)
        key = Endpoints(load_secret(self.folder / "state")).key(episode.execution)
        base = f"{service}/x/{episode.execution}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
            yield Agent(self, episode, client)

    @contextlib.asynccontextmanager
    async def playing(self, **harness: Any) -> AsyncIterator[tuple[Agent, Waiting]]:
        """One agent, with a rollout service and a node of sandboxes of its own."""
        sandboxes = Waiting(self.bus)
        async with sandboxes.up(), self.service(f"replica{self._number}") as context:
            try:
                async with self.agent(context.url, sandboxes, **harness) as agent:
                    yield agent, sandboxes
            finally:
                sandboxes.over.set()


def _below(pid: int) -> Iterator[tuple[int, str]]:
    """The descendants of a process, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                if fields[0] not in "ZX":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = children.get(pid, [])
    while waiting:
        one = waiting.pop(0)
        waiting = [*waiting, *children.get(one, [])]
        with contextlib.suppress(OSError):
            yield one, Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def whole_prompts(calls: list[Call]) -> list[tuple[int, ...]]:
    """Each call's prompt, put together from what it added to its parent's."""
    prompts: dict[str, tuple[int, ...]] = {}
    texts: dict[str, tuple[int, ...]] = {}
    for call in calls:
        before = texts[call.parent][: call.prefix_tokens] if call.parent is not None else ()
        prompts[call.call] = (*before, *call.prompt_ids)
        texts[call.call] = (*prompts[call.call], *call.sampled_ids)
    return [prompts[call.call] for call in calls]


def tree_of(calls: list[Call]) -> Tree:
    def given(number: int, one: Call) -> Given:
        prefix = one.prefix_tokens if one.parent is not None else None
        return Given(one.call, one.prompt_ids, one.sampled_ids, one.parent, prefix, number, execution=one.execution)

    return build(given(number, one) for number, one in enumerate(calls))


@contextlib.asynccontextmanager
async def vllm_stack(folder: Path, directory: Path, models: Mapping[str, TinyModel]) -> AsyncIterator[VllmStack]:
    """A broker, the run `r`, and the hosts."""
    port = embedded.free_port()
    command = tuple(embedded.nats_command(folder / "nats", port))
    url = f"nats://127.0.0.1:{port}"
    notes: list[str] = []
    async with Supervisor(folder / "logs", notes.append) as supervisor:
        supervisor.start([Program("nats", command, ready="port", port=port, stop_s=15)])
        assert await supervisor.wait_ready(["nats"], 60) == {}, notes
        async with Bus(url, "test") as bus:
            await bootstrap(bus)
            stack = VllmStack(bus, folder, url, directory, models)
            await stack.prepare()
            supervisor.follow(url)
            async with stack.hosts(supervisor):
                yield stack
