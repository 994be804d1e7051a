"""`gyre sandbox`: the sandboxes of the nodes on the bus, from a terminal.

Nodes are found by the discovery of NATS micro. A fault is one sentence; `exec` ends with the command's own status.
"""

import asyncio
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from opengyre.cli import sandbox_images
from opengyre.cli import stack as stacks
from opengyre.cli.client import JsonOption, StateDirOption, console, errors, show_json, show_listing
from opengyre.cli.sandbox_client import MARGIN_S, NodeOption, ask, nodes, run
from opengyre.cli.sandbox_exec import run_command
from opengyre.cli.sandbox_select import Wanted, age, labels, wanted
from opengyre.cli.stack import StackError
from opengyre.cli.stream_read import connected
from opengyre.cli.streams import NatsOption
from opengyre.proto.sandbox import (
    DestroyRequest,
    DestroyResult,
    ExecResult,
    InfoRequest,
    ListRequest,
    ListResult,
    NodeInfo,
    SandboxInfo,
    StatRequest,
)
from opengyre.proto.sandbox_jobs import LogPage, LogsRequest, SpawnRequest
from opengyre.sandbox import doctor as machine_doctor
from opengyre.sandbox.clear import clear
from opengyre.shared.bus import Bus

TIMED_OUT = 124
"""Exit status of `exec` where the command was killed for its time, as of timeout(1)."""
KILLED = 137
LabelOption = Annotated[list[str] | None, typer.Option("--label", help="KEY=VALUE; may be repeated, all must hold.")]
Sandbox = Annotated[str, typer.Argument(help="Id of a sandbox; `gyre sandbox ls` lists them.")]


def register(app: typer.Typer) -> None:
    sandbox = typer.Typer(name="sandbox", help="Look at, use and remove sandboxes.", no_args_is_help=True)
    sandbox.command("ls")(ls)
    sandbox.command("exec", context_settings={"allow_interspersed_args": False})(exec_)
    sandbox.command("logs")(logs)
    sandbox.command("network")(network)
    sandbox.command("gc")(gc)
    sandbox.command("doctor")(doctor)
    sandbox_images.register(sandbox)
    app.add_typer(sandbox)


async def listing(
    bus: Bus, node: str | None = None, wanted_labels: Mapping[str, str] | None = None
) -> list[SandboxInfo]:
    """All sandboxes that carry the labels, in order of node and creation."""
    request = ListRequest(labels=wanted_labels or {})
    found: list[SandboxInfo] = []
    for name in await nodes(bus, node):
        found += (await ask(bus, name, "list", request, ListResult)).sandboxes
    return found


async def _where(bus: Bus, sandbox: str) -> str:
    found = {info.sandbox: info.node for info in await listing(bus)}
    if sandbox not in found:
        raise StackError(f"sandbox {sandbox[:120]!r} is on no node; `gyre sandbox ls` lists {len(found)}")
    return found[sandbox]


def ls(
    label: LabelOption = None, node: NodeOption = None, nats: NatsOption = None, state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """List the sandboxes of all nodes.

    Example: gyre sandbox ls --label run=demo
    """

    async def work() -> list[SandboxInfo]:
        async with connected(nats, state_dir) as bus:
            return await listing(bus, node, labels(label))

    found = run(work())
    if json:
        show_json(found)
        return
    table = Table("sandbox", "node", "owner", "labels", "age", "ends in", "commands", "running", "isolated")
    for info in found:
        table.add_row(
            info.sandbox, info.node, info.owner, " ".join(f"{key}={text}" for key, text in info.labels.items()),
            age(info.age_s), age(info.expires_in_s), str(info.execs), " ".join(info.running) or "-",
            "yes" if info.isolated else "no",
        )  # fmt: skip
    show_listing(table)


def exec_(
    sandbox: Sandbox,
    command: Annotated[list[str], typer.Argument(help="Text for sh; several words are joined by spaces.")],
    timeout: Annotated[float, typer.Option(min=0.01, max=86400, help="Seconds, after which it is killed.")] = 30.0,
    user: Annotated[str | None, typer.Option(help="Who runs it; default: the sandbox's user.")] = None,
    cwd: Annotated[str | None, typer.Option(help="Where it starts; default: the working folder.")] = None,
    exec_id: Annotated[str | None, typer.Option("--id", help="An id; the command runs once for it.")] = None,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Run a command in a sandbox; ends with its status, 124 where its time was over.

    Options of this command come first; what follows the sandbox is the command's. Ctrl-C ends the command as well.

    Example: gyre sandbox exec --timeout 60 r-g000001-e00-a0 ls -l
    """
    request = SpawnRequest(
        sandbox=sandbox,
        exec_id=exec_id or f"cli-{uuid.uuid4().hex[:12]}",
        command=" ".join(command),
        timeout_s=timeout,
        output_limit=1 << 20,
        user=user,
        cwd=cwd,
    )

    async def work() -> ExecResult:
        async with connected(nats, state_dir) as bus:
            return await run_command(bus, await _where(bus, sandbox), request)

    done = run(work())
    if json:
        show_json(done)
    else:
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        for name, cut, size in (
            ("stdout", done.stdout_truncated, done.stdout_bytes),
            ("stderr", done.stderr_truncated, done.stderr_bytes),
        ):
            if cut:
                more = f"gyre sandbox logs {sandbox} {done.exec_id} --stream {name}"
                errors.print(f"{name} had {size} bytes; the middle is left out here: {more}", soft_wrap=True)
        if done.killed_by is not None:
            errors.print(f"killed: {done.killed_by}", soft_wrap=True)
    if done.exit_code is None:
        raise typer.Exit(TIMED_OUT if done.timed_out else KILLED)
    raise typer.Exit(done.exit_code)


def logs(
    sandbox: Sandbox,
    command: Annotated[str, typer.Argument(help="Id of a command; `gyre sandbox ls` shows those that run.")],
    stream: Annotated[str, typer.Option(help="stdout or stderr.")] = "stdout",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the command runs.")] = False,
    offset: Annotated[int, typer.Option(help="Byte to begin at; negative counts from the end.")] = 0,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Print what a command has written, all of it, page by page.

    Example: gyre sandbox logs r-g000001-e00-a0 t3 --follow
    """
    if stream not in ("stdout", "stderr"):
        raise StackError(f"--stream is {stream!r}; allowed: stdout, stderr")

    async def work() -> None:
        async with connected(nats, state_dir) as bus:
            node, start = await _where(bus, sandbox), offset
            while True:
                request = LogsRequest(sandbox=sandbox, exec_id=command, stream=stream, offset=start)
                page = await ask(bus, node, "logs", request, LogPage)
                _show_page(page, json)
                start = page.next_offset
                if page.next_offset >= page.total:
                    if not (follow and page.running):
                        return
                    await asyncio.sleep(0.25)  # a command's output has no event on the bus

    run(work())


def _show_page(page: LogPage, json: bool) -> None:
    if json:
        show_json(page)
        return
    sys.stdout.buffer.write(page.data)
    sys.stdout.flush()
    if not page.complete:
        size = "" if page.written is None else f", {page.written} bytes,"
        errors.print(f"the full text{size} is not kept any more; this is the shortened one", soft_wrap=True)


def network(
    sandbox: Sandbox, nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Show which hosts a sandbox may reach, and which it tried to reach all the same.

    Example: gyre sandbox network r-g000001-e00-a0
    """

    async def work() -> SandboxInfo:
        async with connected(nats, state_dir) as bus:
            return await ask(bus, await _where(bus, sandbox), "stat", StatRequest(sandbox=sandbox), SandboxInfo)

    use = run(work()).network
    if json:
        show_json(use)
        return
    if use is None:
        print("no network")
        return
    print(f"may reach: {' '.join(use.allowed_hosts) or 'no host'}")
    print(f"requests: {use.requests}, denied: {use.denied}, sent: {use.sent_bytes} B, received: {use.received_bytes} B")
    for host, count in sorted(use.denials.items(), key=lambda item: -item[1]):
        print(f"denied: {host} {count} times")


def gc(
    label: LabelOption = None,
    owner: Annotated[str | None, typer.Option(help="Only of this owner.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Only those made this long ago: 90s, 20m, 3h, 2d.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every sandbox of every node.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
    node: NodeOption = None,
    nats: NatsOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Remove sandboxes now instead of at the end of their leases; what a stopped stack left, where none runs.

    Example: gyre sandbox gc --label run=demo --older-than 2h
    """
    chosen = wanted(labels(label), owner, older_than, every)

    directory = stacks.directory(state_dir)
    if chosen is not None:
        removed = run(_collect(chosen, dry_run, node, nats, state_dir))
    elif stacks.owner(directory) is None:
        removed = run(clear(directory))
    else:
        raise StackError(f"a stack runs in {directory}; say which: --label, --owner, --older-than or --all")
    if json:
        show_json(removed)
        return
    for name in removed:
        print(name)
    errors.print(f"{len(removed)} {'would be ' if dry_run else ''}removed", soft_wrap=True)


async def _collect(
    chosen: Wanted, dry_run: bool, node: str | None, nats: str | None, state_dir: Path | None
) -> list[str]:
    async with connected(nats, state_dir) as bus:
        found = [info for info in await listing(bus, node, chosen.labels) if chosen.takes(info)]
        if not dry_run:
            for info in found:
                await ask(bus, info.node, "destroy", DestroyRequest(sandbox=info.sandbox), DestroyResult, MARGIN_S)
    return [info.sandbox for info in found]


def doctor(nats: NatsOption = None, state_dir: StateDirOption = None, json: JsonOption = False) -> None:
    """Say what sandboxes of this machine can be held to, and what the nodes on the bus can do.

    Example: gyre sandbox doctor
    """
    findings = machine_doctor.check()

    async def work() -> list[NodeInfo]:
        async with connected(nats, state_dir) as bus:
            return [await ask(bus, name, "info", InfoRequest(), NodeInfo) for name in await nodes(bus)]

    why = None
    found: list[NodeInfo] = []
    try:
        found = run(work())
    except StackError as error:  # the machine can be looked at without a stack
        why = str(error)
    if json:
        show_json({"machine": findings, "nodes": found, "nodes_missing": why})
    else:
        for finding in findings:
            mark = "missing" if not finding.ok else "warning" if finding.remedy else "ok"
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            console.print(f"{mark:<8}{finding.name}: {finding.message}{remedy}", markup=False, soft_wrap=True)
        for info in found:
            _show_node(info)
        if why is not None:
            console.print(f"nodes: {why}", markup=False, soft_wrap=True)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(1)


def _show_node(info: NodeInfo) -> None:
    can = msgspec.to_builtins(info.capabilities)
    able = [name for name, value in can.items() if value is True]
    unable = [name for name, value in can.items() if value is False]
    console.print(
        f"node {info.node}: {can['backend']}, {info.sandboxes} of {info.max_sandboxes} sandboxes", soft_wrap=True
    )
    console.print(f"  can: {', '.join(able) or 'nothing'}", soft_wrap=True)
    if unable:
        console.print(f"  cannot, and refuses: {', '.join(unable)}", soft_wrap=True)
    for sentence in info.unenforced:
        console.print(f"  not enforced: {sentence}", markup=False, soft_wrap=True)
    if info.images:
        console.print(f"  images: {', '.join(info.images)}", markup=False, soft_wrap=True)
