"""Every `gyre bench` that a signal ends leaves no process and no folder, and has the signal's exit status."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opengyre.cli import bench_sandbox
from opengyre.cli.bench_sandbox_rows import Client
from opengyre.cli.up import end_sandboxes

SOON_MS = 60_000
"""For what takes a second on a machine that does nothing else."""
TELL = "import os, sys\nwith open(os.environ['TOLD'], 'w') as told: print(os.getpid(), *sys.orig_argv, file=told)\n"
"""Every Python that starts says so, before anything else."""
VLLM = """#!/bin/sh
[ "$1" = -c ] && echo True && exit
echo $$ vllm > "$TOLD"
exec sleep 600
"""
"""Says that it has vLLM, and starts for ever."""
BENCHES = {
    "table1": ("--rows C0", "opengyre.allocator"),
    "trajectory": ("--parts broker --groups 1", "opengyre.trajectory"),
    "membership": ("--ways blobs --parameters 1000", "spawn_main"),
    "trainer": ("--only e", "opengyre.cli.bench_trainer_child"),
    "sandbox": ("--parts latency", "opengyre.sandbox"),
    "router": ("--concurrency 1", "opengyre.rollout"),
    "engine": ("--rounds 1", "vllm"),
}
"""Options, and what is in the command line of a program that the bench starts."""
# Of the programs only these are processes of the terminal, which all have its Ctrl-C.
ENDS = [*((name, signal.SIGTERM) for name in BENCHES), ("membership", signal.SIGINT)]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "number"), ENDS)
def test_a_bench_that_a_signal_ends_leaves_nothing(tmp_path: Path, name: str, number: signal.Signals) -> None:
    options, program = BENCHES[name]
    told, folder = tmp_path / "told", tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(told)
    (tmp_path / "sitecustomize.py").write_text(TELL)
    (vllm := tmp_path / "vllm").write_text(VLLM)
    vllm.chmod(0o755)
    environment = {
        **os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(tmp_path), "TOLD": str(told),
        "GYRE_HOST__VLLM_PYTHON": str(vllm), "GYRE_HOST__VLLM_KV_GB": "1",
    }  # fmt: skip
    with (
        told.open("r+b", buffering=0) as lines,
        subprocess.Popen(
            [sys.executable, "-m", "opengyre.cli", "bench", name, *options.split()],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        ) as bench,
    ):  # fmt: skip
        try:
            started: list[int] = []
            line = ""
            while program not in line:
                line = lines.readline().decode()
                started.append(int(line.split()[0]))
            assert list(folder.iterdir())
            if number == signal.SIGINT:
                os.killpg(bench.pid, number)  # as a terminal's Ctrl-C
            else:
                bench.terminate()
            assert bench.stdout is not None
            said = bench.stdout.read()
            assert bench.wait(SOON_MS / 1000) == 128 + number
        finally:
            bench.kill()
    assert "Traceback" not in said
    assert said.endswith("stopped; nothing runs any more\n")
    assert not list(folder.iterdir())
    assert all(map(_ends, started))


def _ends(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(SOON_MS))
        finally:
            os.close(handle)
    return True


async def test_the_sandboxes_of_a_bench_that_ends_early_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They outlive their service by design, so that it finds them."""
    ended: list[str] = []

    async def end(state: Path) -> list[str]:
        ended.extend(await end_sandboxes(state))
        return ended

    monkeypatch.setattr(bench_sandbox, "end_sandboxes", end)
    async with bench_sandbox.service(8) as (bus, folder, _):
        await Client(bus, bench_sandbox.NODE).create("left")
    assert ended == ["left"]
    assert not folder.exists()
