"""What an agent program finds, and why it ended."""

import shlex

import msgspec
import pytest

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.run import Harness, InvalidRunError, RunSpec, validate
from opengyre.proto.sandbox import ExecResult
from opengyre.proto.task import TaskSpec
from opengyre.proto.traj import PROGRAM, Call, Started, ToolResult
from opengyre.rollout.episode import rebuild
from opengyre.rollout.program import PORT, command_of, ended, environment, port_of

DISPATCH = EpisodeDispatch(
    run="r", group="r-g000000", execution="r-g000000-e00", members=(), version=0, seed=1, min_members=1,
    task=TaskSpec(task="t", instruction="say 'hi'; rm -rf $HOME\n`x`"),
    harness=Harness(agent="program", program="run me"),
)  # fmt: skip
RESULT = ExecResult(
    exec_id="x", exit_code=0, stdout="", stderr="", stdout_bytes=0, stderr_bytes=0, stdout_truncated=False,
    stderr_truncated=False, timed_out=False, duration_s=9.0, isolated=True,
)  # fmt: skip


def test_the_command_sets_what_clients_read_and_quotes_it() -> None:
    found = environment(DISPATCH, PORT, "key")
    assert found["OPENAI_BASE_URL"] == f"{found['ANTHROPIC_BASE_URL']}/v1" == "http://127.0.0.1:4000/x/r-g000000-e00/v1"
    words = shlex.split(command_of(DISPATCH, PORT, "key"))
    assert f"GYRE_INSTRUCTION={DISPATCH.task.instruction}" in words
    assert words[-2:] == ["run", "me"]
    ports = {port_of(f"e{number}", isolated=False) for number in range(50)}
    assert len(ports) > 45
    assert all(20_000 <= port < 50_000 for port in ports)


@pytest.mark.parametrize(
    ("changes", "refused", "reason"),
    [
        ({}, None, "done"),
        ({}, "overflow", "done"),
        ({"exit_code": 1}, "overflow", "overflow"),
        ({}, "turn_budget", "turn_budget"),
        ({"exit_code": 1}, None, "agent_error"),
        ({"exit_code": None, "timed_out": True, "killed_by": "timeout"}, None, "time_budget"),
        ({"exit_code": None, "killed_by": "output"}, None, "agent_error"),
    ],
)
def test_why_a_program_ended(changes: dict, refused: str | None, reason: str) -> None:
    assert ended(msgspec.structs.replace(RESULT, **changes), refused).reason == reason  # type: ignore[arg-type]  # fields by keyword, checked at run time


def test_the_time_of_a_program_is_not_counted_twice() -> None:
    at = {"run": "r", "group": "g", "execution": "e", "attempt": 0}
    call = Call(
        **at, index=1, call="c0", turn=0, request_digest="", parent=None, prefix_tokens=0, prompt_ids=(1,),
        sampled_ids=(2,), logprobs=(0.0,), versions=(), temperature=1.0, finish_reason="stop", text="", hosts=(),
        duration_s=4.0,
    )  # type: ignore[arg-type] # fmt: skip
    end = ToolResult(
        **at, index=2, turn=PROGRAM, exec_id="x", command="run me", exit_code=0, output="", output_bytes=0,
        timed_out=False, duration_s=9.0,
    )  # type: ignore[arg-type] # fmt: skip
    synthetic = msgspec.structs.replace(
        DISPATCH, harness=Harness(agent="synthetic")
    )  # in no sandbox, so it acts at once
    log = [Started(**at, index=0, dispatch=synthetic, replica="p"), call, end]  # type: ignore[arg-type]  # fields by keyword, checked at run time
    assert rebuild(log).active_s == 9.0


def test_a_program_must_be_named() -> None:
    with pytest.raises(InvalidRunError, match=r"harness\.program"):
        validate(RunSpec(run="r", model="m", harness=Harness(agent="program")))
