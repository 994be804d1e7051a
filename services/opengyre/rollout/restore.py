"""A sandbox that is gone is made again from the episode's log: its first files, then its commands, in order.

That is only as good as the commands are repeatable, so each must do again what was recorded (exit status and what the
agent saw of its output); at the first that does not, the episode cannot go on. What a command did beside the sandbox
cannot be: it has no network.

Awaits: those of `Sandboxes`, with their bounds; the whole takes as long as the commands took.
"""

import logging

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import SandboxRef
from opengyre.rollout import shell
from opengyre.rollout.history import History
from opengyre.rollout.sandboxes import InvalidCommandError, Sandboxes, SandboxLostError

log = logging.getLogger("gyre.rollout.restore")


async def restored(sandboxes: Sandboxes, dispatch: EpisodeDispatch, history: History, owner: str) -> SandboxRef:
    """A new sandbox in the recorded state; raises `SandboxLostError` naming the command that did something else."""
    harness = dispatch.harness
    ref = await sandboxes.open(dispatch, owner)
    recorded = [turn.result for turn in history.turns() if turn.result is not None]
    for result in recorded:
        try:
            again = await sandboxes.execute(ref, result.exec_id, result.command, harness.command_timeout_s)
        except InvalidCommandError as error:
            same = str(error)[: harness.observation_chars] == result.output
        else:
            seen = shell.observation(again, harness.observation_chars)
            same = (again.exit_code, again.timed_out, seen) == (result.exit_code, result.timed_out, result.output)
        if not same:
            raise SandboxLostError(f"the sandbox is gone, and {result.exec_id} did something else in a new one")
    log.info("%s: the sandbox was gone and is made again by %d commands", dispatch.execution, len(recorded))
    return ref
