"""A task of others as an episode: its environment, its agent's commands, its tests at the end, in real sandboxes."""

from pathlib import Path

import msgspec
import pytest

from opengyre.cli.task_files import load_tasks
from opengyre.proto.run import Scoring
from opengyre.proto.traj import Ended, Progressed, ToolResult, Verified
from support import eventually
from support.foreign_tasks import BENCH_TASK, harbor, write
from support.rollout_fakes import Stack, dispatch
from support.sandboxes import on_images

pytestmark = on_images


@pytest.fixture
def stack(host_stack: Stack) -> Stack:
    return host_stack


async def test_tasks_of_others_are_solved_and_scored_in_their_environments(stack: Stack, tmp_path: Path) -> None:
    harbor(tmp_path / "tasks" / "answer")
    write(tmp_path / "tasks" / "bench", BENCH_TASK)
    answer, bench = load_tasks(tmp_path / "tasks")
    assert (answer.task, bench.task) == ("answer", "bench")
    assert (answer.instruction, answer.time_budget_s) == ("Write 42 into /app/answer.", 20.0)
    base = dispatch(max_turns=4)
    alike = Scoring(grading="separate", progress_every=1)
    async with stack.host("h0", ["pwd", "echo 42 > answer", "done"]).up(), stack.service():
        for number, task in enumerate((answer, bench)):
            episode = msgspec.structs.replace(base, execution=f"{base.execution}{number}", task=task, scoring=alike)
            await stack.submit(episode)
            await eventually(lambda episode=episode: stack.ended(episode), 120)
            log = await stack.log(episode)
            assert [event.output for event in log if isinstance(event, ToolResult)] == ["/app", ""]
            (verified,) = [event for event in log if isinstance(event, Verified)]
            assert (verified.infra_error, [(part.name, part.value) for part in verified.parts]) == (
                None,
                [("reward", 1.0)],
            )
            along = [[part.value for part in event.parts] for event in log if isinstance(event, Progressed)]
            assert along == [[0.0], [0.0], [1.0]]
            assert isinstance(log[-1], Ended)
            assert log[-1].reason == "done"


async def test_a_verifier_in_an_environment_of_its_own_scores_an_episode(stack: Stack, tmp_path: Path) -> None:
    harbor(
        tmp_path / "tasks" / "apart",
        task_DOT_toml='artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n',
        tests__Dockerfile="FROM debian\nCOPY . /tests/\n",
    )
    (task,) = load_tasks(tmp_path / "tasks")
    base = msgspec.structs.replace(dispatch(max_turns=3), task=task)
    async with stack.host("h0", ["echo 42 > answer", "done"]).up(), stack.service():
        for number, scoring in enumerate((Scoring(grading="separate"), Scoring(grading="shared"))):
            episode = msgspec.structs.replace(base, execution=f"{base.execution}{number}", scoring=scoring)
            await stack.submit(episode)
            await eventually(lambda episode=episode: stack.ended(episode), 120)
            (verified,) = [event for event in await stack.log(episode) if isinstance(event, Verified)]
            assert (verified.infra_error, [part.value for part in verified.parts]) == (None, [1.0])
