"""A sandbox that is gone is made again from the episode's log: its first files, then its commands, in order.

That is only as good as the commands are repeatable. Each must end again as it was recorded (its exit status, or its
timeout); at the first that does not, the episode cannot go on. Another output alone is told in the log and accepted:
it is mostly a time or a process id, and ending an episode for it would be worse. Beside the sandbox a command did
nothing that would be done twice: it has no network.

A writer that takes over does so where it finds the sandbox gone; where it is lost under the same writer, that one does,
`MOST` times at most: a command that is the end of every sandbox shall not have one after another.

Invariant: each time a sandbox of its own name is made, so that one that was left half restored is never taken for the
episode's; its lease ends it.

Awaits: those of `Sandboxes`, with their bounds; the whole takes as long as the commands took.
"""

import logging

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import SandboxRef
from opengyre.rollout import shell
from opengyre.rollout.history import History
from opengyre.rollout.sandboxes import InvalidCommandError, Sandboxes, SandboxLostError
from opengyre.rollout.steps import Stage, at, line_of

log = logging.getLogger("gyre.rollout.restore")

MOST = 3
"""Sandboxes that one writer makes again."""


def name_of(line: str, attempt: int, number: int) -> str:
    """The sandbox that the writer of that attempt makes again as its `number`th, from 0; `line` is the execution or one
    of its lanes."""
    return f"{line}-a{attempt}" + (f"-{number}" if number else "")


async def restored(
    sandboxes: Sandboxes, dispatch: EpisodeDispatch, history: History, owner: str, name: str, stage: Stage | None = None
) -> SandboxRef:
    """A new sandbox of that name in the state that the history's line left; raises `SandboxLostError` naming the
    command that did something else. `stage`: where a task of several steps is."""
    ref = await sandboxes.open(dispatch, owner, name)
    try:
        async with sandboxes.kept(lambda: ref, owner, at_once=False):
            if stage is None:
                await _repeat(sandboxes, ref, dispatch, history, None)
            else:
                await _repeat_steps(sandboxes, ref, history, stage)
    except SandboxLostError:
        await sandboxes.destroy(ref)
        raise
    return ref


async def _repeat_steps(sandboxes: Sandboxes, ref: SandboxRef, history: History, stage: Stage) -> None:
    """Each step as it was: what came with it, its commands, and its evaluation, as that ends what was left running and
    may change files. What the evaluation says now is of no account."""
    execution, task = stage.dispatch.execution, stage.dispatch.task
    for step in range(stage.step + 1):
        line = line_of(execution, step)
        if step < stage.step or stage.prepared:
            fault = await sandboxes.prepare(ref, line, task.steps[step])
            if fault is not None:
                raise SandboxLostError(f"the sandbox is gone, and step {step} cannot begin in a new one: {fault}")
        now = at(stage.dispatch, step)
        await _repeat(sandboxes, ref, now, history, step)
        if step < stage.step:
            try:
                await sandboxes.verify(ref, now, f"{line}-again", now.scoring.grading)
            except InvalidCommandError as error:
                raise SandboxLostError(f"the sandbox is gone, and step {step} is not judged again: {error}") from error


async def _repeat(
    sandboxes: Sandboxes, ref: SandboxRef, dispatch: EpisodeDispatch, history: History, step: int | None
) -> None:
    harness = dispatch.harness
    turns = [turn for turn in history.turns() if turn.call.step == step]
    recorded = [turn.result for turn in turns if turn.result is not None]
    for result in recorded:
        try:
            again = await sandboxes.execute(ref, result.exec_id, result.command, harness.command_timeout_s)
        except InvalidCommandError:
            continue  # it was refused then as well: nothing ran
        if (again.exit_code, again.timed_out) != (result.exit_code, result.timed_out):
            raise SandboxLostError(f"the sandbox is gone, and {result.exec_id} ended in another way in a new one")
        if shell.observation(again, harness.observation_chars) != result.output:
            log.warning("%s printed something else in the sandbox that was made again", result.exec_id)
    log.info("%s: the sandbox was gone and is made again by %d commands", dispatch.execution, len(recorded))
