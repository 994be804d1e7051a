"""What watches a command may itself come late, on a machine that is busy: what it then says and does."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opengyre.sandbox import processes
from opengyre.sandbox.launch import execs, tree
from opengyre.sandbox.launch.tree import Process, belonging


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the marker of a command."""
    with subprocess.Popen(["sleep", "60"], env={tree.MARKER: f"late.{os.getpid()}"}) as process:
        try:
            while not any(row.marker == f"late.{os.getpid()}" for row in tree.read_table()):
                time.sleep(0.01)  # until the exec has happened
            yield process
        finally:
            process.kill()


def test_a_command_that_has_ended_is_not_timed_out_by_a_monitor_that_looks_late(tmp_path: Path) -> None:
    """Its exit status was lost, and with it a turn of an agent or a score."""
    start = cast("execs.Start", SimpleNamespace(timeout_s=5.0, no_output_s=None, spool_limit=1 << 20))
    readable, writable = os.pipe()
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(["true"]) as leader:
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
        watched: Any = (leader.pid, readable, None)
        assert execs._watch(start, [out.fileno()], time.monotonic() - 60, *watched) is None
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(["sleep", "60"]) as leader:
        watched = (leader.pid, readable, None)
        assert execs._watch(start, [out.fileno()], time.monotonic() - 60, *watched) == "timeout"
        leader.kill()
    os.close(readable)
    os.close(writable)


def test_a_killer_that_comes_late_kills_all_the_same(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its time was over before its first look, what a command had started ran on."""
    monkeypatch.setattr(tree, "BOUND_S", -1.0)
    tree._kill_all_of(0, f"late.{os.getpid()}", None)
    assert sleeper.wait(30) < 0


@pytest.mark.parametrize(("becomes", "taken"), [("another", {7}), (None, {7, 8}), ("mine", {7, 8})])
def test_who_is_arriving_is_looked_at_again(
    becomes: str | None, taken: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another command had only just started was killed."""
    told: list[int] = []
    monkeypatch.setattr(tree, "_signal", lambda pid, _: told.append(pid))
    seventh = Process(7, 1, 7, 100, "mine")
    looks = [
        [seventh, Process(8, 1, 8, 100, None, arriving=True)],
        [seventh, Process(8, 1, 8, 100, None, arriving=True)],
        [seventh, Process(8, 1, 8, 100, becomes)],
        [seventh],
    ]
    found = tree.stop(lambda: looks.pop(0), lambda table: belonging(table, 0, "mine", 50), time.monotonic() + 60)
    assert found == set(told) == taken


def test_who_never_arrives_counts_as_unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_signal", lambda *_: None)
    table = [Process(8, 1, 8, 100, None, arriving=True), Process(9, 0, 9, 100, "another")]
    assert tree.stop(lambda: table, lambda rows: belonging(rows, 0, "mine", 50), time.monotonic()) == {8}


@pytest.mark.parametrize(("flags", "arriving"), [(0x00208040, False), (0x00400000, True)])
def test_the_kernels_own_processes_never_arrive(flags: int, arriving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have neither an environment nor a command line for good, and would be waited for each time."""
    stat = f"2 (k (w) x) S 0 0 0 0 -1 {flags} " + "0 " * 12 + "31 0 0"
    monkeypatch.setattr(tree, "_proc", lambda _, name: stat.encode() if name == "stat" else b"")
    row = tree.read_process(2)
    assert row is not None
    assert (row.pid, row.parent, row.started, row.marker, row.arriving) == (2, 0, 31, None, arriving)


def test_a_sandbox_is_not_cleared_before_who_is_arriving_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had only just been started ran on after its sandbox was removed."""
    looks = [[Process(8, 1, 8, 100, None, arriving=True)], [Process(8, 1, 8, 100, "s")], []]
    monkeypatch.setattr(tree, "read_table", lambda _: looks.pop(0))
    monkeypatch.setattr(processes, "_argument", lambda _: None)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    processes.kill_by_marker(lambda value: value == "s")
    assert (killed, looks) == ([8], [])
