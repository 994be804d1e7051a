"""The end of an execution whose dispatch cannot be handled: its group must not wait for it.

`Ended` is appended with the reason `infra`, by a writer like any other: fenced, and never after another `Ended`. It
asks nothing of the model, of the agent or of the states of an episode, and passes over what cannot be read in the log:
any of these may be why the dispatch is given up.

Awaits: those of `Journal`; the removal of the sandbox, bounded.
"""

import logging

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.sandbox import SandboxRef
from opengyre.proto.traj import Call, Ended, SandboxOpened
from opengyre.rollout.journal import Journal
from opengyre.rollout.sandboxes import Sandboxes
from opengyre.shared import metrics

log = logging.getLogger("gyre.rollout")


async def give_up(journal: Journal, sandboxes: Sandboxes, dispatch: EpisodeDispatch, replica: str, why: str) -> None:
    """End the execution, if it has not ended; `why` is kept in its log. `journal` is its, and new.

    Raises `FencedError` where another replica is its writer.
    """
    before = await journal.load(readable=True)
    if any(isinstance(event, Ended) for event in before):
        return
    await journal.begin(replica)
    calls = [event for event in before if isinstance(event, Call)]
    await journal.append(
        Ended,
        reason="infra",
        detail=f"given up: {why}",
        turns=len(calls),
        sampled_tokens=sum(len(call.sampled_ids) for call in calls),
        duration_s=sum(call.duration_s for call in calls),
        members=dispatch.members,
    )
    metrics.EPISODES_ENDED.labels("infra").inc()
    metrics.EPISODES_INTERRUPTED.inc()
    log.error("%s is given up: %s", dispatch.execution, why)
    # Of each line the last one: those before it are gone.
    for opened in {event.lane: event for event in before if isinstance(event, SandboxOpened)}.values():
        await sandboxes.destroy(SandboxRef(sandbox=opened.sandbox, node=opened.node, isolated=opened.isolated))
