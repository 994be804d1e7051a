"""The work queue of episodes (stream EPISODES): one message an execution."""

from typing import ClassVar, Literal

from opengyre.proto import subjects
from opengyre.proto.base import Event
from opengyre.proto.run import Harness, Sampling, Scoring
from opengyre.proto.task import TaskSpec


class EpisodeDispatch(Event, frozen=True, kw_only=True, tag="episode.dispatch.v1"):
    """Run one execution. It carries all that is needed, so that any replica of `rollout` can begin or continue it."""

    stream: ClassVar[str] = subjects.EPISODES
    run: str
    group: str
    execution: str
    members: tuple[str, ...]
    """All executions of the group, in order."""
    version: int
    """`v_d`."""
    seed: int
    """Of the execution: f(run's seed, group, member), so that members differ and a rerun is the same."""
    group_seed: int = 0
    """Of the group: f(run's seed, group), for what its executions have in common."""
    task: TaskSpec
    harness: Harness
    min_members: int
    advantage: Literal["grpo", "loo", "no_std"] = "grpo"
    """Of the run's optimization; it is in the log, so that the log alone makes the group again."""
    sampling: Sampling = Sampling()
    """Of the run, for the same reason."""
    scoring: Scoring = Scoring()
    """Of the run, for the same reason."""
    close_at: int | None = None
    """Scored members at which the group closes. None: when all have ended."""

    def event_id(self) -> str:
        return f"episode-{self.execution}"
