"""What the verbs of `gyre sandbox` share: the nodes on the bus, asking one, and faults as one sentence."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from opengyre.cli.stack import StackError
from opengyre.proto.sandbox import SERVICE
from opengyre.sandbox.core import InfraError
from opengyre.shared.bus import Bus, BusError, RpcFailedError, call, discover

T = TypeVar("T")
PREFIX = f"gyre-{SERVICE}-"
ASK_S = 10.0
MARGIN_S = 40.0
"""What a command's answer may take beside the command."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
NodeOption = Annotated[str | None, typer.Option("--node", help="Only this node; default: all that answer.")]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a verb; raises `StackError`, and ends the command where it is interrupted."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (BusError, RpcFailedError, InfraError) as error:
        raise StackError(str(error)) from error


async def ask(bus: Bus, node: str, verb: str, request: msgspec.Struct, reply: type[T], bound_s: float = ASK_S) -> T:
    """Ask a node; `bound_s` bounds all of it."""
    return await call(bus, SERVICE, node, verb, request, reply, timeout_s=bound_s, patience_s=bound_s)


async def nodes(bus: Bus, node: str | None = None) -> list[str]:
    """Names of the nodes that answer; raises `StackError` where there is none, or not the one that was named."""
    found = [name.removeprefix(PREFIX) for name in await discover(bus, PREFIX) if name != f"{PREFIX}any"]
    if node is not None and node not in found:
        raise StackError(f"node {node!r} does not answer; there are: {', '.join(found) or 'none'}")
    if not found:
        raise StackError("no sandbox service answers on the bus; `gyre up` starts one")
    return found if node is None else [node]
