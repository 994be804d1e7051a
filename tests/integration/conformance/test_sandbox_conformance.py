"""What every backend does alike. Tests are named after the findings that they answer: `row_N` is a bug that others had,
`trap_N` one that was met while the backends were made.

The Docker part runs where an engine answers (``DOCKER_HOST``, or the usual socket) and has the image of
``TEST_SANDBOX_IMAGE``; docs/sandbox.md says how one is had, and shows a run.
"""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from opengyre.sandbox.core import (
    InvalidRequest,
)
from support.both_backends import Box, until

pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


async def is_there(box: Box, path: str) -> bool:
    return (await box.run(f"test -e {path}")).exit_code == 0


# Commands


async def test_a_command_runs_in_its_workspace_with_its_files(shared: Box):
    done = await shared.run("pwd; cat in/a.txt; id -u; hostname; echo oops >&2; exit 3")
    assert (done.exit_code, done.stderr) == (3, "oops\n")
    assert done.stdout == "/workspace\nhello\n1000\nsandbox\n"
    assert (done.timed_out, done.killed_by, done.isolated, done.oom) == (False, None, True, False)


async def test_row_40_an_exit_status_is_never_lost(shared: Box):
    for _ in range(3):
        results = await asyncio.gather(*(shared.run("exit 42") for _ in range(8)))
        assert {done.exit_code for done in results} == {42}


async def test_row_01_timeout_kills_the_tree(shared: Box):
    began = time.monotonic()
    done = await shared.run("sh -c 'sleep 301.5; :' | cat", timeout_s=0.5)
    assert (done.timed_out, done.exit_code, done.killed_by) == (True, None, "timeout")
    assert time.monotonic() - began < 100
    assert await shared.count("sleep 301.5") == 0


async def test_trap_06_timeout_kills_what_left_its_session_parents_and_environment(shared: Box):
    waits = "touch /tmp/up; until [ -e /tmp/go ]; do sleep 0.05; done; rm /tmp/up /tmp/go; echo unharmed"
    other = asyncio.ensure_future(shared.run(waits, timeout_s=120))
    await until(partial(is_there, shared, "/tmp/up"))
    done = await shared.run("setsid sleep 61.5 & (setsid env -i /bin/sleep 62.5 &) ; sleep 63.5", timeout_s=0.7)
    assert done.timed_out
    assert [await shared.count(f"sleep {n}") for n in ("61.5", "62.5", "63.5")] == [0, 0, 0]
    await shared.run("touch /tmp/go")
    assert (await other).stdout == "unharmed\n"


async def test_a_killed_command_takes_along_nothing_that_another_one_has_only_just_started(box: Box):
    """A process that is becoming another program shows no environment, and so not whose it is."""
    backend, spec = box.node.backend, box.spec
    starts = "until [ -e /tmp/go ]; do /bin/true || echo harmed; done"
    other = asyncio.ensure_future(box.run(f"for n in 1 2 3 4; do {starts} & done; touch /tmp/up; wait", timeout_s=300))
    await until(partial(is_there, box, "/tmp/up"))
    for n in range(30):
        await backend.spawn(spec, f"job{n}", "sleep 301.5", 300.0, 100)
        await backend.kill(box.name, f"job{n}")
    await box.run("touch /tmp/go")
    done = await other
    assert (done.exit_code, done.stdout) == (0, "")
    assert await box.count("sleep 301.5") == 0


async def test_row_05_a_background_child_that_holds_stdout_holds_nobody(box: Box):
    done = await box.run("sleep 301.5 & echo started")
    assert (done.stdout, done.exit_code) == ("started\n", 0)
    await box.sees("sleep 301.5")


async def test_row_06_all_output_is_there_when_a_background_child_goes_on(box: Box):
    done = await box.run("sleep 31.5 & head -c 200000 /dev/zero | tr '\\0' x", limit=300_000)
    assert (done.stdout_bytes, done.stdout_truncated, len(done.stdout)) == (200_000, False, 200_000)


async def test_row_08_partial_output_is_kept_on_timeout(shared: Box):
    done = await shared.run("echo a; echo b >&2; sleep 99", timeout_s=3)
    assert (done.stdout, done.stderr, done.timed_out) == ("a\n", "b\n", True)


async def test_row_08_silence_can_be_bounded_as_well(shared: Box):
    done = await shared.run_so("echo a; sleep 99", no_output_timeout_s=2)
    assert (done.stdout, done.killed_by, done.exit_code) == ("a\n", "no_output", None)


async def test_row_09_the_next_command_works_after_a_timeout(shared: Box):
    assert (await shared.run("sleep 9", timeout_s=0.2)).timed_out
    assert (await shared.run("echo ok")).stdout == "ok\n"


async def test_row_11_output_that_is_not_utf8_is_replaced(shared: Box):
    done = await shared.run("printf '\\377\\376\\0abc'")
    assert (done.stdout, done.stdout_bytes) == ("\ufffd\ufffd\0abc", 6)


async def test_row_12_wide_characters_stay_whole_over_chunks_and_cuts(shared: Box):
    await shared.run("i=0; while [ $i -lt 7000 ]; do printf '€€€€€€€€€€'; i=$((i+1)); done > /tmp/wide")
    whole = await shared.run("cat /tmp/wide", limit=300_000)
    assert whole.stdout == "€" * 70_000
    cut = await shared.run("cat /tmp/wide", limit=1000)
    assert "\ufffd" not in cut.stdout
    assert (cut.stdout_bytes, cut.stdout_truncated) == (210_000, True)
    assert set(cut.stdout.split("[")[0].strip()) == {"€"}


async def test_row_13_truncation_is_said_with_the_true_count(shared: Box):
    done = await shared.run("head -c 10001 /dev/zero | tr '\\0' x", limit=10_000)
    assert (done.stdout_truncated, done.stdout_bytes) == (True, 10_001)
    assert not (await shared.run("head -c 10000 /dev/zero | tr '\\0' x", limit=10_000)).stdout_truncated


async def test_row_14_a_flood_is_capped_counted_and_killed(box: Box):
    done = await box.run("yes; echo after", limit=1000)
    assert (done.killed_by, done.exit_code, done.stdout_truncated) == ("output", None, True)
    assert 16 << 20 <= done.stdout_bytes <= 17 << 20
    assert len(done.stdout) < 1100
    assert (await box.run("echo ok")).stdout == "ok\n"
    assert await box.count("yes") == 0


async def test_row_15_standard_input_is_empty(shared: Box):
    assert (await shared.run("cat; echo done")).stdout == "done\n"


async def test_row_16_standard_input_that_is_given_ends(shared: Box):
    done = await shared.run_so("cat; echo done", stdin=b"\0\xffgiven\n", timeout_s=10)
    assert done.stdout == "\0\ufffdgiven\ndone\n"


@pytest.mark.parametrize("field", ["timeout_s", "limit"])
async def test_row_41_a_command_has_a_deadline_and_a_cap(shared: Box, field: str):
    for value in (-1, 10**9):
        bounds: dict[str, Any] = {field: value}
        with pytest.raises(InvalidRequest, match="allowed is"):
            await shared.run("true", **bounds)


async def test_row_10_no_prompt_and_no_profile_is_read(shared: Box):
    await shared.run("echo 'echo noise; PS1=x' | tee /workspace/.bashrc > /workspace/.profile")
    assert (await shared.run("echo ok")).stdout == "ok\n"
    assert (await shared.run("rm .bashrc .profile")).exit_code == 0


async def test_trap_10_a_long_command_is_no_argument(shared: Box):
    text = "x" * 200_000
    assert (await shared.run(f"printf %s '{text}' | wc -c")).stdout.strip() == "200000"


async def test_trap_01_the_environment_of_the_service_is_not_seen(shared: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_SERVICE", "hunter2-in-the-environment")
    done = await shared.run(
        "env; for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' <$f 2>/dev/null; done", limit=1 << 19
    )
    assert "PATH=" in done.stdout
    assert "hunter2" not in done.stdout
    assert not done.stdout_truncated


async def test_environment_folder_and_user_of_one_command(shared: Box):
    done = await shared.run_so("pwd; echo $A; id -u", cwd="/tmp", env={"A": "1"})
    assert done.stdout == "/tmp\n1\n1000\n"
    if shared.node.backend.capabilities().users:
        assert (await shared.run_so("id -u", user="1234")).stdout == "1234\n"


# Background commands


async def written(box: Box, size: int) -> bool:
    return (await box.node.backend.logs(box.name, "job", "stdout", 0, 100)).total >= size


async def test_row_26_a_background_command_is_polled_read_and_its_status_kept(box: Box):
    backend = box.node.backend
    command = "echo one; until [ -e go ]; do sleep 0.05; done; echo two; exit 7"
    await backend.spawn(box.spec, "job", command, 120, 1000)
    assert (await backend.poll(box.name, "job")).running
    await until(partial(written, box, 4))
    page = await backend.logs(box.name, "job", "stdout", 0, 100)
    assert (page.data, page.running) == (b"one\n", True)
    await box.run("touch go")
    status = await backend.poll(box.name, "job", 60)
    assert status.result is not None
    assert (status.running, status.result.exit_code, status.result.stdout) == (False, 7, "one\ntwo\n")
    assert (await backend.logs(box.name, "job", "stdout", -4, 100)).data == b"two\n"
    assert (await box.run(command, exec_id="job")).exit_code == 7
    with pytest.raises(InvalidRequest, match="none"):
        await backend.poll(box.name, "none")


async def test_row_27_a_background_command_is_killed_with_its_tree(box: Box):
    backend = box.node.backend
    await backend.spawn(box.spec, "job", "(setsid env -i /bin/sleep 41.5 &) ; sleep 42.5", 60, 1000)
    await box.sees("sleep 41.5")
    await backend.kill(box.name, "job")
    status = await backend.poll(box.name, "job", 60)
    assert status.result is not None
    assert (status.result.exit_code, status.result.killed_by, status.result.timed_out) == (None, "kill", False)
    assert [await box.count(f"sleep {n}") for n in ("41.5", "42.5")] == [0, 0]
    await backend.kill(box.name, "job")


async def test_a_command_is_killed_that_has_only_just_been_started(box: Box):
    """The engine of containers has been told of it and has not made its process yet."""
    backend = box.node.backend
    for n in range(5):
        await backend.spawn(box.spec, f"job{n}", "sleep 43.5", 300, 1000)
        await backend.kill(box.name, f"job{n}")
        status = await backend.poll(box.name, f"job{n}")
        assert status.result is not None
        assert status.result.killed_by == "kill"
    assert await box.count("sleep 43.5") == 0


async def test_a_signal_reaches_a_background_command(box: Box):
    backend = box.node.backend
    await backend.spawn(
        box.spec, "job", "trap 'echo heard; exit 5' TERM; echo up; while :; do sleep 0.05; done", 60, 1000
    )
    await until(partial(written, box, 3))
    await backend.kill(box.name, "job", "TERM")
    status = await backend.poll(box.name, "job", 60)
    assert status.result is not None
    assert (status.result.stdout, status.result.exit_code) == ("up\nheard\n", 5)
