"""Whether the stack that a run is sent to can serve and train its policy, asked before anything is submitted; and what
the run takes of it.

Of an embedded stack the settings are those that its hosts were started with, and memory is this machine's, with what
the stack's own processes hold: they give it up or hold it for this run. Of any other stack nothing is known but that a
call is no longer than the policy has positions. Without a policy's directory here nothing of it is looked at.
"""

import os
from pathlib import Path

from opengyre.cli.estimate import Estimate, estimated
from opengyre.cli.fits import UNBOUNDED, Room, check_cells, check_positions, fitting, serving_of
from opengyre.cli.recipe import Plan
from opengyre.cli.stack import Stack
from opengyre.cli.supervisor_plan import MARK
from opengyre.cli.task_files import TaskFileError
from opengyre.host.vllm_machine import free_memory, gpus_of
from opengyre.host.vllm_plan import facts_of
from opengyre.policy.directory import read_config, tiny_config
from opengyre.shared.settings import HostSettings
from opengyre.sizing.hardware import Hardware
from opengyre.sizing.shape import FAMILIES, shape_of
from opengyre.tiny.config import ModelDirectoryError, TinyConfig


def check_fits(recipe: Path, found: Plan, stack: Stack | None) -> None:
    """Raise `TaskFileError`, one sentence, for a run that `stack` cannot do; None: a stack that is elsewhere."""
    directory = Path(found.run.model)
    host = None if stack is None else settings_of(stack)
    try:
        if stack is not None and host is not None and host.cell is None:
            check_cells(found.run, stack.cells)
        if not directory.is_dir():
            return
        if stack is None or host is None:
            _check_elsewhere(found, directory)
        else:
            _check_here(found, directory, host, stack)
    except ModelDirectoryError as error:
        raise TaskFileError(f"{recipe}: {error}") from error


def estimated_on(recipe: Path, found: Plan, stack: Stack, host: HostSettings) -> Estimate | None:
    """What the run takes of this machine's stack, whose hosts have these settings. None as in `estimated`, and of hosts
    that have no model, or cards that nothing is known of. Raises `TaskFileError` for what the stack cannot do, too."""
    check_fits(recipe, found, stack)
    if host.engine == "emulated" or (host.engine == "vllm" and gpus_of(os.environ)):
        return None
    # Which hosts make the cells that are named is not known here.
    hardware = None if host.cell is not None else Hardware(cells=stack.cells)
    return estimated(recipe, found, host, hardware, held(Path(stack.state_dir)))


def settings_of(stack: Stack) -> HostSettings | None:
    """Those that its hosts were started with, where it says them."""
    return None if stack.host is None else HostSettings.model_validate(stack.host)


def _check_elsewhere(found: Plan, directory: Path) -> None:
    positions = read_config(directory).get("max_position_embeddings")
    if isinstance(positions, int):
        check_positions(found.run, positions)


def _check_here(found: Plan, directory: Path, host: HostSettings, stack: Stack) -> None:
    if host.engine == "emulated":
        return  # it has no model
    fields = read_config(directory)
    if host.engine == "tiny":
        try:
            TinyConfig.from_hf(fields)
        except ModelDirectoryError as error:
            raise ModelDirectoryError(
                f"run.model is {directory}, which the stack's hosts cannot serve by the tiny engine ({error}); allowed "
                "is a policy of the tiny engine, or `gyre up --engine vllm`"
            ) from error
    room = _room(stack, gpus_of(os.environ) if host.engine == "vllm" else 0)
    facts = facts_of(directory)
    if tiny_config(fields) is None and (fields["model_type"] not in FAMILIES or fields.get("num_experts")):
        # Of such a shape memory for training is not worked out.
        check_positions(found.run, facts.context)
        serving_of(found.run, facts, host, room)
        return
    fitting(found.run, facts, shape_of(fields, str(directory / "config.json")), host, room)


def _room(stack: Stack, gpus: int) -> Room:
    """With GPUs memory is not looked at: an engine that runs holds it, and each host asks its own when it starts."""
    if gpus:
        return Room(gpus, stack.cells, UNBOUNDED, None)
    memory = free_memory() + held(Path(stack.state_dir))
    return Room(0, stack.cells, memory, memory, more="gyre up --hosts")


def held(state_dir: Path) -> int:
    """Bytes of memory that the processes of the stack hold for themselves."""
    mark = f"{MARK}={state_dir.absolute()}".encode()
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                _, resident, shared, *_ = (process / "statm").read_text().split()
                total += (int(resident) - int(shared)) * page
        except OSError:
            continue  # another's, or it has just ended
    return total
