"""A host and a sandbox node that speak the real protocols, with scripts for minds; and a rollout service in process."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from opengyre.proto import codec, ids, subjects
from opengyre.proto.base import tag_of
from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.host import HostState, HostStatus, Sampler
from opengyre.proto.run import Harness, RunSpec
from opengyre.proto.sandbox import (
    CheckResult,
    DestroyRequest,
    DestroyResult,
    ExecRequest,
    ExecResult,
    ForwardRequest,
    ForwardResult,
    RenewRequest,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
    StatRequest,
    VerifyRequest,
    VerifyResult,
)
from opengyre.proto.sandbox_trees import (
    DropRequest,
    DropResult,
    ForkRequest,
    ForkResult,
    SnapshotInfo,
    SnapshotRequest,
)
from opengyre.proto.task import Check, TaskSpec
from opengyre.proto.traj import AnyTrajEvent
from opengyre.rollout.service import Rollout
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, Endpoint, RpcFailedError, read, serving
from opengyre.shared.http import app_of, listen, serving_http
from opengyre.shared.lifecycle import Context
from opengyre.shared.settings import HttpSettings, Settings
from opengyre.tiny.tokenizer import TinyTokenizer
from support import eventually

TEXTS = ["write one into a.txt", "echo one > a.txt", "cp a.txt b.txt", "cat b.txt", "done"]


def model_directory(folder: Path) -> Path:
    TinyTokenizer.train(TEXTS, 300).save(folder)
    return folder


def dispatch(run: str = "r", number: int = 0, member: int = 0, **harness: object) -> EpisodeDispatch:
    group = ids.group_id(run, number)
    task = TaskSpec(
        task=f"t{number}",
        instruction="write one into a.txt",
        files={"a.txt": "zero\n"},
        checks=(Check(name="there", command="[ -f a.txt ]", weight=1.0),),
    )
    return EpisodeDispatch(
        run=run,
        group=group,
        execution=ids.execution_id(group, member),
        members=tuple(ids.execution_id(group, n) for n in range(2)),
        version=0,
        seed=1234 + member,
        task=task,
        harness=Harness(**{"max_turns": 4, "time_budget_s": 300.0, **harness}),  # type: ignore[arg-type]  # fields by keyword, checked at run time
        min_members=1,
    )


class FakeHost:
    """Answers `/inference/v1/generate` with the script's command of the turn, one token each `delay_s`."""

    def __init__(self, bus: Bus, tokenizer: TinyTokenizer, name: str, script: list[str]) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.script = script
        self.delay_s = 0.0
        self.version = 0
        self.state = HostState.ROLLOUT
        self.sampler = Sampler()
        self.draining = asyncio.Event()
        self.streams = False
        """Whether each token is sent as it is said."""
        self.hold_after: int | None = None
        """Of a stream: the tokens after which it waits for `go_on`."""
        self.go_on = asyncio.Event()
        self.pause_after: int | None = None
        """Of a call that is no stream: the tokens after which it waits for `go_on`, or for a drain."""
        self.pausing = asyncio.Event()
        self.cut_after: int | None = None
        """Of a stream: the tokens after which its connection is lost, once."""
        self.alternatives: dict[int, list[str]] = {}
        """Of a turn: what is said to the first call, to the second, and so on."""
        self._chosen: dict[int, dict[str, int]] = {}
        self.requests: list[dict] = []
        self.calls = 0
        self.url = ""
        self._bucket = Bucket(bus, subjects.KV_HOSTS, HostStatus)
        self._marker = tokenizer.render([{"role": "user", "content": ""}])[-1]

    async def become(self, state: HostState) -> None:
        """Take a state and say so, as a host does."""
        self.state = state
        if state is HostState.ROLLOUT:
            self.draining.clear()
        else:
            self.draining.set()
        status = HostStatus(
            host=self.name, cell=self.name, boot="b", state=state, epoch=1, url=self.url, engine="fake", run=None,
            sampler=self.sampler,
        )  # fmt: skip
        await self._bucket.put(self.name, status)

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if self.state is not HostState.ROLLOUT:
            return JSONResponse({"error": {"type": "not_serving", "message": self.state.value}}, status_code=503)
        prompt: list[int] = body["token_ids"]
        turns = [at for at, token in enumerate(prompt) if token == self._marker]
        text = " " + self._said(max(0, min(len(turns), len(self.script)) - 1), body["request_id"])
        whole = [*self.tokenizer.encode(text), self.tokenizer.end_id]
        begun = prompt[turns[-1] + 1 :] if turns else []
        if whole[: len(begun)] == begun:
            rest = whole[len(begun) :]
        else:  # begun by another's hand, in tokens of its own
            rest = [*self.tokenizer.encode(text[len(self.tokenizer.decode(begun)) :]), self.tokenizer.end_id]
        if self.streams and body["stream"]:
            increments = self._increments(rest[: body["sampling_params"]["max_tokens"]])
            return StreamingResponse(increments, media_type="text/event-stream")
        said: list[int] = []
        finish = "length"
        self.calls += 1
        try:
            for at, token in enumerate(rest[: body["sampling_params"]["max_tokens"]]):
                if at == self.pause_after:
                    await self._pause()
                if self.delay_s:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self.delay_s):
                            await self.draining.wait()
                if self.draining.is_set():
                    finish = "abort"
                    break
                said.append(token)
            else:
                finish = "stop" if said and said[-1] == self.tokenizer.end_id else "length"
        finally:
            self.calls -= 1
        choice = {
            "token_ids": said,
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in said]},
            "finish_reason": finish,
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(said)}] if said else [],
        }
        return JSONResponse({"choices": [choice]})

    def _said(self, turn: int, request: str) -> str:
        texts = self.alternatives.get(turn)
        if texts is None:
            return self.script[turn]
        call = request.rsplit("-", 1)[0]  # without the number of the try
        chosen = self._chosen.setdefault(turn, {})
        return texts[chosen.setdefault(call, len(chosen)) % len(texts)]

    async def _pause(self) -> None:
        self.pausing.set()
        waits = [asyncio.create_task(event.wait()) for event in (self.go_on, self.draining)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _increments(self, tokens: list[int]) -> AsyncIterator[bytes]:
        self.calls += 1
        try:
            for at, token in enumerate(tokens):
                if at == self.hold_after:
                    await self.go_on.wait()
                if at == self.cut_after:
                    self.cut_after = None
                    raise ConnectionResetError("the host is gone")
                end = "stop" if token == self.tokenizer.end_id else "length"
                choice = {
                    "token_ids": [token],
                    "logprobs": {"content": [{"token_id": token, "logprob": -0.5}]},
                    "finish_reason": end if at == len(tokens) - 1 else None,
                    "weight_versions": [{"version": str(self.version), "start": at, "end": at + 1}],
                }
                yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                await asyncio.sleep(self.delay_s)
        finally:
            self.calls -= 1

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator["FakeHost"]:
        sock = listen(HttpSettings())
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        app = app_of([Route("/inference/v1/generate", self.generate, methods=["POST"])])
        async with serving_http(sock, app, shutdown_s=1):
            await self.become(HostState.ROLLOUT)
            yield self


class FakeSandboxes:
    """A node whose commands print what they were and take `delay_s`; each exec id runs once."""

    def __init__(self, bus: Bus, node: str = "n0") -> None:
        self._bus = bus
        self.node = node
        self.live: dict[str, SandboxSpec] = {}
        self.created: Counter[str] = Counter()
        self.ran: list[str] = []
        self.renewed: Counter[str] = Counter()
        self.verified: Counter[str] = Counter()
        self.modes: list[str] = []
        self.evaluations: list[str] = []
        self.destroyed: set[str] = set()
        self.forwarded: dict[str, ForwardRequest] = {}
        self.delay_s = 0.0
        self.print: dict[str, str] = {}
        self.passes = 1.0
        self.invalid_verifications = 0
        self.snapshots: dict[str, SandboxSpec] = {}
        self.keeps = True
        """Whether it takes snapshots."""
        self._execs: dict[tuple[str, str], asyncio.Task[ExecResult]] = {}

    def lose(self) -> None:
        """The node forgets its sandboxes, and what runs in them is answered so."""
        self.live.clear()
        for task in self._execs.values():
            if not task.done():
                task.cancel()

    def _check(self, sandbox: str) -> None:
        if sandbox not in self.live:
            raise RpcFailedError("sandbox_gone", f"there is no sandbox {sandbox}")

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        if spec.sandbox not in self.live:
            self.created[spec.sandbox] += 1
            self.live[spec.sandbox] = spec
        return SandboxRef(sandbox=spec.sandbox, node=self.node, isolated=True, expires_in_s=spec.ttl_s)

    async def execute(self, request: ExecRequest) -> ExecResult:
        self._check(request.sandbox)
        key = (request.sandbox, request.exec_id)
        task = self._execs.get(key)
        if task is None:
            task = self._execs[key] = asyncio.create_task(self._run(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RpcFailedError("sandbox_gone", f"{request.sandbox} went away") from None
            raise

    async def _run(self, request: ExecRequest) -> ExecResult:
        self.ran.append(request.exec_id)
        await asyncio.sleep(self.delay_s)
        out = self.print.get(request.command, "")
        return ExecResult(
            exec_id=request.exec_id, exit_code=0, stdout=out, stderr="", stdout_bytes=len(out), stderr_bytes=0,
            stdout_truncated=False, stderr_truncated=False, timed_out=False, duration_s=0.0, isolated=True,
        )  # fmt: skip

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        self._check(request.sandbox)
        self.evaluations.append(request.verify_id)
        self.modes.append(request.mode)
        if request.mode != "live":
            self.verified[request.sandbox] += 1
        valid = request.mode == "live" or self.verified[request.sandbox] > self.invalid_verifications
        parts = tuple(CheckResult(name=c.name, passed=self.passes, weight=c.weight) for c in request.checks)
        return VerifyResult(
            verify_id=request.verify_id, parts=parts, passed=len(parts), total=len(parts), valid=valid,
            infra_error=None if valid else "the check could not be started",
        )  # fmt: skip

    async def renew(self, request: RenewRequest) -> SandboxRef:
        self._check(request.sandbox)
        self.renewed[request.sandbox] += 1
        return SandboxRef(sandbox=request.sandbox, node=self.node, isolated=True)

    async def forward(self, request: ForwardRequest) -> ForwardResult:
        self._check(request.sandbox)
        self.forwarded[request.sandbox] = request
        return ForwardResult(port=request.port)

    async def stat(self, request: StatRequest) -> SandboxInfo:
        self._check(request.sandbox)
        running = tuple(name for (box, name), task in self._execs.items() if box == request.sandbox and not task.done())
        return SandboxInfo(
            sandbox=request.sandbox, node=self.node, owner="", labels={}, isolated=True, age_s=0.0, expires_in_s=60.0,
            execs=len(running), running=running,
        )  # fmt: skip

    async def snapshot(self, request: SnapshotRequest) -> SnapshotInfo:
        self._check(request.sandbox)
        if not self.keeps:
            raise RpcFailedError("invalid_request", "a snapshot is not possible here")
        self.snapshots[request.snapshot] = self.live[request.sandbox]
        return SnapshotInfo(
            snapshot=request.snapshot, node=self.node, sandbox=request.sandbox, size=0, expires_in_s=60.0
        )

    async def fork(self, request: ForkRequest) -> ForkResult:
        if request.snapshot not in self.snapshots:
            raise RpcFailedError("invalid_request", f"there is no snapshot {request.snapshot}")
        spec = self.snapshots[request.snapshot]
        return ForkResult(
            sandboxes=tuple(
                [await self.create(msgspec.structs.replace(spec, sandbox=name)) for name in request.sandboxes]
            )
        )

    async def drop(self, request: DropRequest) -> DropResult:
        return DropResult(snapshot=request.snapshot, existed=self.snapshots.pop(request.snapshot, None) is not None)

    async def destroy(self, request: DestroyRequest) -> DestroyResult:
        self.destroyed.add(request.sandbox)
        return DestroyResult(sandbox=request.sandbox, existed=self.live.pop(request.sandbox, None) is not None)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator["FakeSandboxes"]:
        own = {
            "exec": Endpoint(ExecRequest, self.execute),
            "verify": Endpoint(VerifyRequest, lambda request: self.verify(request)),
            "renew": Endpoint(RenewRequest, self.renew),
            "forward": Endpoint(ForwardRequest, self.forward),
            "stat": Endpoint(StatRequest, self.stat),
            "snapshot": Endpoint(SnapshotRequest, self.snapshot),
            "fork": Endpoint(ForkRequest, self.fork),
            "drop": Endpoint(DropRequest, self.drop),
            "destroy": Endpoint(DestroyRequest, self.destroy),
        }
        async with (
            serving(self._bus, "sandbox", "any", {"create": Endpoint(SandboxSpec, self.create)}),
            serving(self._bus, "sandbox", self.node, own),
        ):
            try:
                yield self
            finally:
                self.lose()  # the endpoints end when what they wait for has


class Stack:
    """A run, its model directory, a sandbox node and dispatches."""

    def __init__(self, bus: Bus, folder: Path, url: str) -> None:
        self.bus = bus
        self.folder = folder
        self.nats_url = url
        self.model = model_directory(folder / "model")
        self.tokenizer = TinyTokenizer.load(self.model)
        self.sandboxes = FakeSandboxes(bus)

    async def prepare(self, run: str = "r") -> None:
        await Bucket(self.bus, subjects.KV_RUNS, RunSpec).put(run, RunSpec(run=run, model=str(self.model)))

    def host(self, name: str, script: list[str]) -> FakeHost:
        return FakeHost(self.bus, self.tokenizer, name, script)

    async def submit(self, episode: EpisodeDispatch) -> None:
        await self.bus.publish(subjects.episode_dispatch(episode.run), episode)

    async def log(self, episode: EpisodeDispatch) -> list[AnyTrajEvent]:
        scope = subjects.traj(episode.run, episode.group, episode.execution, ">")
        events = [stored.event() for stored in await read(self.bus, subjects.TRAJ, scope)]
        return [event for event in events if isinstance(event, AnyTrajEvent)]

    async def ended(self, episode: EpisodeDispatch) -> bool:
        scope = subjects.traj(episode.run, episode.group, episode.execution, "ended")
        return await self.bus.last(scope, subjects.TRAJ) is not None

    async def drained(self) -> bool:
        """No dispatch is left: all are acknowledged."""
        return (await self.bus.stream_info(subjects.EPISODES)).state.messages == 0

    async def submit_again(self, episode: EpisodeDispatch) -> None:
        """The same dispatch, as a message of its own."""
        await self.bus.publish_raw(
            subjects.episode_dispatch(episode.run), codec.encode(episode), "again", tag_of(episode)
        )

    @contextlib.asynccontextmanager
    async def service(self, replica: str = "one", **rollout: object) -> AsyncIterator[Context]:
        """A rollout service in this process, stopped at the end of the block as by SIGTERM.

        Its episodes end first; the pull that waits for a further dispatch is not waited for.
        """
        settings = Settings.model_validate(
            {"state_dir": self.folder / "state", "bus": {"url": self.nats_url}, "rollout": rollout}
        )
        sock = listen(settings.http)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with Bus(self.nats_url, replica) as bus, Blobs(settings.state_dir / "blobs", settings.cache) as blobs:
            context = Context("rollout", replica, settings, bus, blobs, url)
            service = Rollout(context)
            async with serving_http(sock, app_of(list(service.routes()))):
                running = asyncio.create_task(service.run())
                try:
                    yield context
                finally:
                    context.stopping.set()
                    await eventually(lambda: not service.live, 60)
                    running.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await running
