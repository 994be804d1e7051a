"""`gyre task check` in real sandboxes: what nothing and the solution earn, and what is said where that fails."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.sandbox import stand_in
from opengyre.sandbox.images import Images
from opengyre.tasks.archives import contents, unsqueeze
from opengyre.tasks.convert import environment_of, spec_of, unused
from opengyre.tasks.directory import read_task
from opengyre.tasks.errors import TaskError
from support.foreign_tasks import APART_TASK, BENCH_TASK, PYTEST_TASK, STEPS_TASK, harbor, real_task, write
from support.sandboxes import on_images

pytestmark = on_images


def check(*paths: Path, options: tuple[str, ...] = ("--stand-in", "host"), code: int = 0) -> Any:
    """The facts that the command prints, or its sentence where it refuses."""
    done = CliRunner().invoke(app, ["task", "check", *map(str, paths), "--json", *options])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if done.stdout else " ".join(done.stderr.split())


@pytest.fixture(params=["bubblewrap", "docker"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, tuple[str, ...]]:
    """The words for what stands in for a base on a backend, and the options that choose both."""
    if request.param == "bubblewrap":
        return "host root", ("--stand-in", "host")
    both_backends = pytest.importorskip("support.both_backends", reason="needs the extra opengyre[docker]")
    if why := both_backends.missing("docker"):
        pytest.skip(why)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{both_backends.SOCKET}")
    monkeypatch.setenv("GYRE_SANDBOX__DOCKER_IMAGE", both_backends.IMAGE)
    return f"image {both_backends.IMAGE}", ("--backend", "docker", "--stand-in", both_backends.IMAGE)


def test_real_tasks_are_worth_0_and_1_on_every_reward(node: tuple[str, tuple[str, ...]]) -> None:
    tasks = real_task("simple-task"), real_task("multi-reward")
    base, options = node
    facts = check(*tasks, options=options)
    rewards = {fact["task"]: (fact["nothing"]["rewards"], fact["reference"]["rewards"]) for fact in facts}
    assert rewards == {
        "simple-task": ({"reward": 0.0}, {"reward": 1.0}),
        "multi-reward": ({"correctness": 0.0, "performance": 0.0}, {"correctness": 1.0, "performance": 1.0}),
    }
    assert [fact["environment"] for fact in facts] == [
        f"{base} in place of ubuntu:24.04, replayed 2 of 2 instructions",
        f"{base} in place of ubuntu:24.04, replayed 3 of 3 instructions",
    ]
    assert all(fact["ok"] for fact in facts)


def test_tests_with_an_environment_of_their_own_see_the_artifacts_and_nothing_else(
    tmp_path: Path, node: tuple[str, tuple[str, ...]]
) -> None:
    base, options = node
    (fact,) = check(write(tmp_path / "apart", APART_TASK), options=options)
    assert (fact["nothing"]["rewards"], fact["reference"]["rewards"]) == ({"reward": 0.0}, {"reward": 1.0}), fact
    assert fact["remarks"] == [
        f"environment of the tests: {base} in place of debian:bookworm-slim, replayed 4 of 4 instructions",
        "not used here: environment.mcp_servers, environment.skills_dir",
    ]


def test_tasks_of_several_steps_are_checked_on_either_backend(
    tmp_path: Path, node: tuple[str, tuple[str, ...]]
) -> None:
    (fact,) = check(write(tmp_path / "steps", STEPS_TASK), options=node[1])
    assert fact["ok"], fact
    assert fact["reference"]["steps"] == [{"reward": 1.0}] * 2


def test_pytest_that_pip_found_runs_as_a_program_and_as_a_module(
    tmp_path: Path, node: tuple[str, tuple[str, ...]]
) -> None:
    """`pip install pytest` said that it is there, and then there was no program `pytest`."""
    script = "#!/bin/bash\npip install pytest==8.4.1\npython3 -m pytest --version || exit 3\npytest $TEST_DIR -rA\n"
    files = {
        **BENCH_TASK,
        "run-tests.sh": script,
        "Dockerfile": f"{BENCH_TASK['Dockerfile']}ENV PYTHONPATH=/app/lib\n",
        "tests/test_path.py": "import os, sys\n"
        "def test_the_path_is_the_programs():\n    assert not {'', os.getcwd()} & set(sys.path)\n"
        "def test_what_the_environment_says_comes_before_the_tools():\n"
        "    assert sys.path.index('/app/lib') < sys.path.index('/opt/gyre/tools') == len(sys.path) - 1\n",
    }
    (fact,) = check(write(tmp_path / "bench", files), options=node[1])
    assert (fact["reference"]["passed"], fact["reference"]["total"]) == (4, 4), fact["reference"]["output"]
    assert fact["baseline"] == 3


def test_a_health_check_that_never_succeeds_is_a_failed_evaluation(tmp_path: Path) -> None:
    sick = 'version = "1.0"\n[environment.healthcheck]\ncommand = "echo sick; false"\ninterval_sec = 0.1\nretries = 2\n'
    (fact,) = check(harbor(tmp_path / "task", task_DOT_toml=sick), code=1)
    words = "the health check 'echo sick; false' failed to the end, at last as it ended with exit status 1: sick"
    assert words in fact["remarks"][0]


def test_tasks_of_every_kind_are_checked_at_once(tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "bench", BENCH_TASK)
    write(tmp_path / "tasks" / "counts", PYTEST_TASK)
    write(tmp_path / "tasks" / "steps", STEPS_TASK)
    facts = {fact["task"]: fact for fact in check(tmp_path / "tasks")}
    assert list(facts) == ["bench", "org/counts", "steps"]
    bench, counts, steps = facts.values()
    # One of two tests passes with nothing done: that is a baseline, not a reward.
    assert bench["format"] == "terminal-bench-1"
    assert (bench["nothing"]["rewards"], bench["baseline"], bench["nothing"]["total"]) == ({"reward": 0.0}, 1, 2)
    assert bench["reference"]["rewards"] == {"reward": 1.0}
    assert (counts["nothing"]["passed"], counts["reference"]["passed"], counts["reference"]["total"]) == (1, 3, 3)
    assert counts["environment"].endswith(
        "in place of python:3.12-slim, replayed 8 of 9 instructions (CMD passed over)"
    )
    assert counts["ok"]
    # A step whose reward is too low ends the task; one that was not reached counts as 0.
    assert (steps["nothing"]["rewards"], steps["nothing"]["steps"]) == ({"reward": 0.0}, [{"reward": 0.0}])
    assert (steps["reference"]["rewards"], steps["reference"]["steps"]) == ({"reward": 1.0}, [{"reward": 1.0}] * 2)


def test_what_is_wrong_with_a_task_is_said_and_is_no_zero(tmp_path: Path) -> None:
    late = 'version = "1.0"\n[verifier]\ntimeout_sec = 0.5\n'
    harbor(tmp_path / "tasks" / "a-late", task_DOT_toml=late, tests__test_DOT_sh="#!/bin/sh\nsleep 30\n")
    harbor(tmp_path / "tasks" / "b-silent", tests__test_DOT_sh="#!/bin/sh\nexit 0\n")
    harbor(tmp_path / "tasks" / "c-nan", tests__test_DOT_sh="#!/bin/sh\necho nan > /logs/verifier/reward.txt\n")
    harbor(tmp_path / "tasks" / "d-generous", tests__test_DOT_sh="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    harbor(tmp_path / "tasks" / "e-weak", solution__solve_DOT_sh="echo 41 > answer\n")
    harbor(tmp_path / "tasks" / "f-build", environment__Dockerfile="FROM x\nRUN echo so; exit 3\n")
    harbor(tmp_path / "tasks" / "g-stages", environment__Dockerfile="FROM a AS b\nFROM c\nCOPY --from=b /x /y\n")
    said = {fact["task"][0]: fact for fact in check(tmp_path / "tasks", code=1)}
    assert not any(fact["ok"] for fact in said.values())
    words = {
        "a": "the verifier ran into its timeout after 0.5 s",
        "b": "the tests left no reward.json and no reward.txt",
        "c": "reward.txt is 'nan'; allowed is one finite number",
        "d": "the solution earns no more than doing nothing",
        "e": "the solution earns only reward=0",
        "f": "Dockerfile line 2 (RUN 'echo so; exit 3') failed, exit status 3: so",
        "g": "cannot be replayed: Dockerfile line 2: a second FROM; allowed is one stage (and 1 more)",
    }
    for name, sentence in words.items():
        assert any(sentence in remark for remark in said[name]["remarks"]), said[name]


def test_a_base_that_is_not_here_is_refused_unless_another_may_stand_in(tmp_path: Path) -> None:
    task = harbor(tmp_path / "task")
    (fact,) = check(task, options=(), code=1)
    assert "environment wants the base 'debian:bookworm-slim', which is not on this machine" in fact["remarks"][0]
    assert "sandbox.stand_in" in fact["remarks"][0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"task_DOT_toml": "[environment]\ncpus = -1\n"}, "task.toml: environment.cpus is -1"),
        ({"task_DOT_toml": "x = "}, "task.toml is not valid TOML"),
        ({"instruction_DOT_md": "\udcff"}, "instruction.md is not UTF-8"),
    ],
)
def test_a_broken_task_is_one_sentence(tmp_path: Path, files: dict[str, str], words: str) -> None:
    broken = {name: text for name, text in files.items() if "\udcff" not in text}
    task = harbor(tmp_path / "task", **broken)
    if not broken:
        (task / "instruction.md").write_bytes(b"\xff")
    said = check(task, code=1)
    assert said.startswith("error: ")
    assert words in said


def test_a_stand_in_that_is_not_here_is_named_before_anything_is_made(
    tmp_path: Path, node: tuple[str, tuple[str, ...]]
) -> None:
    *backend, here = node[1]
    said = check(harbor(tmp_path / "task"), options=(*backend, "nosuch"), code=1)
    assert said.startswith("error: --stand-in (or sandbox.stand_in) is 'nosuch', which is no image of this machine; ")
    assert here in said.partition("allowed:")[2]


def test_an_image_of_the_stacks_node_is_one_of_the_checks(tmp_path: Path) -> None:
    images = Images(tmp_path / "state" / "sandbox" / "node0" / "images", 1 << 30)
    stand_in.ensure(images)
    task = harbor(tmp_path / "task", environment__Dockerfile="FROM host\nWORKDIR /app\n")
    (fact,) = check(task, options=("--state-dir", str(tmp_path / "state")))
    assert fact["environment"] == "image host, replayed 2 of 2 instructions"
    assert images.names() == ["host"]


def test_a_task_that_is_too_large_to_submit_is_not_ok(tmp_path: Path) -> None:
    task = harbor(tmp_path / "task")
    (task / "environment" / "large").write_bytes(random.Random(1).randbytes(4 << 20))
    (fact,) = check(task, code=1)
    assert not fact["ok"]
    assert fact["reference"]["rewards"] == {"reward": 1.0}
    (remark,) = fact["remarks"]
    assert remark.startswith(f"it cannot be submitted: {task}: files make the task ")
    assert remark.endswith(f"bytes of JSON; allowed are at most {4 << 20}")


STRUCTURE = ("instruction.md", "task.toml", "environment", "environment/Dockerfile", "tests", "solution")


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_task_is_what_lies_in_its_directory(tmp_path: Path, name: str) -> None:
    """An `instruction.md` that was a link was followed wherever it led."""
    task = harbor(tmp_path / "task")
    outside = tmp_path / "outside"
    (task / name).rename(outside)
    (task / name).symlink_to("../" * (1 + name.count("/")) + "outside")
    with pytest.raises(TaskError, match=rf"{name} leads to {outside}; allowed are links within the task"):
        spec_of(read_task(task), {})
    (task / name).unlink()
    outside.rename((task / name).with_name("kept"))
    (task / name).symlink_to("kept")
    (tmp_path / "link").symlink_to(task)
    for path in (task, tmp_path / "link"):
        spec = spec_of(read_task(path), {})
        assert spec.instruction == "Write 42 into /app/answer."
        assert spec.tests is not None
        assert "test.sh" in contents(unsqueeze(spec.tests.archive))


def test_an_instruction_that_is_no_file_holds_nobody(tmp_path: Path) -> None:
    task = harbor(tmp_path / "task")
    (task / "instruction.md").unlink()
    os.mkfifo(task / "instruction.md")
    with pytest.raises(TaskError, match=r"instruction\.md is no file"):
        read_task(task)


def test_without_the_stand_ins_a_fetch_fails_and_nothing_is_made_up(tmp_path: Path) -> None:
    script = "#!/bin/sh\ncurl -s https://astral.sh/uv/install.sh | sh || echo 0 > /logs/verifier/reward.txt\n"
    task = harbor(tmp_path / "task", tests__test_DOT_sh=script)
    (fact,) = check(task, options=("--stand-in", "host", "--no-offline"), code=1)
    assert "left no reward.json" in fact["remarks"][0]


def test_what_a_killed_check_left_is_removed_by_the_next(
    node: tuple[str, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes or containers, its snapshots, its folder."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    slow = harbor(tmp_path / "slow", tests__test_DOT_sh="#!/bin/sh\nsleep 100\n")
    running = subprocess.Popen(
        [sys.executable, "-m", "opengyre.cli", "task", "check", str(slow), *node[1]],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(place.glob("gyre-check-*/sandbox*/node/sandboxes/*")):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        running.kill()
        running.wait(10)
    [left] = place.glob("gyre-check-*")
    check(harbor(tmp_path / "quick"), options=node[1])
    assert not left.exists()
    assert not list(place.glob("gyre-check-*"))
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            lines.append(path.read_bytes())
    assert not [line for line in lines if str(left).encode() in line]


def test_steps_whose_rewards_have_names_of_their_own_are_judged_each(
    node: tuple[str, tuple[str, ...]], tmp_path: Path
) -> None:
    """The mean over all steps of a reward that one of them has is below 1, and says nothing about the solution."""
    second = "#!/bin/sh\n[ -f second ] && echo '{\"x\": 1}' > /logs/verifier/reward.json"
    named = {**STEPS_TASK, "steps/two/tests/test.sh": f"{second} || echo '{{\"x\": 0}}' > /logs/verifier/reward.json\n"}
    [fact] = check(write(tmp_path / "named", named), options=node[1])
    assert fact["reference"]["rewards"] == {"reward": 0.5, "x": 0.5}
    assert fact["ok"], fact


def test_what_cannot_be_removed_of_a_killed_check_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("aiodocker", reason="the client of the engine that is away")
    place = tmp_path / "tmp"
    left = place / "gyre-check-dead"
    (left / "sandbox-docker" / "node" / "sandboxes" / "s").mkdir(parents=True)
    (left / "lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("GYRE_SANDBOX__DOCKER_SOCKET", str(tmp_path / "away.sock"))
    [fact] = check(harbor(tmp_path / "quick"))
    assert fact["ok"]
    assert left.exists(), "its containers are there still, once the engine is"
    assert str(left) in caplog.text


NAMED = '[task]\nname = "o/n"\n[verifier]\ntimeout_sec = 20.0\n'
LISTED = 'network_mode = "allowlist"\nallowed_hosts = ["a.org"]\n'
FETCH = (
    '#!/bin/bash\nno_proxy= NO_PROXY= python3 -c "import urllib.request as r; '
    "print(r.urlopen('http://127.0.0.1:{port}/', timeout=10).read().decode())\" > answer\n"
)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that answers 42."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"42")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the one that it replaces
            """Nothing to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made.server_address[1]
        finally:
            made.shutdown()
            thread.join()


def test_a_solution_reaches_the_hosts_of_its_task_and_no_others(
    tmp_path: Path, node: tuple[str, tuple[str, ...]], port: int
) -> None:
    for name, host, reward in (("near", "127.0.0.1", 1.0), ("far", "192.0.2.1", 0.0)):
        toml = NAMED + "[environment]\n" + LISTED.replace("a.org", host)
        fetch = FETCH.replace("{port}", str(port))
        task = harbor(tmp_path / name, task_DOT_toml=toml, solution__solve_DOT_sh=fetch)
        [fact] = check(task, options=node[1], code=0 if reward else 1)
        assert fact["nothing"]["rewards"] == {"reward": 0.0}
        assert fact["reference"]["rewards"] == {"reward": reward}


@pytest.mark.parametrize(
    ("toml", "network", "hosts"),
    [
        ("", "none", ()),
        ('[environment]\nnetwork_mode = "no-network"\n', "none", ()),
        ('[environment]\nnetwork_mode = "public"\n', "none", ()),
        ('[environment]\nnetwork_mode = "allowlist"\n', "allowlist", ()),
        (f"[environment]\n{LISTED}", "allowlist", ("a.org",)),
        (f'[environment]\n{LISTED}[agent]\nnetwork_mode = "no-network"\n', "none", ()),
        (f"[agent]\n{LISTED}", "allowlist", ("a.org",)),
    ],
)
def test_network_mode_is_what_the_agent_may(tmp_path: Path, toml: str, network: str, hosts: tuple[str, ...]) -> None:
    task = read_task(harbor(tmp_path / "t", task_DOT_toml=NAMED + toml))
    environment = environment_of(task, {})
    assert (environment.network, environment.allowed_hosts) == (network, hosts)
    assert [name.split(" ")[0] for name in unused(task)] == (["environment.network_mode"] if "public" in toml else [])


def test_what_a_network_cannot_be_is_named(tmp_path: Path) -> None:
    toml = NAMED + "[environment]\n" + LISTED.replace("a.org", "10.0.0.1/8")
    with pytest.raises(TaskError, match=r"environment\.allowed_hosts\.0 is '10\.0\.0\.1/8': allowed are a host name"):
        read_task(harbor(tmp_path / "bits", task_DOT_toml=toml))
    task = read_task(harbor(tmp_path / "v", task_DOT_toml=NAMED + 'network_mode = "no-network"\n'))
    assert unused(task) == ["verifier.network_mode (its tests reach what the agent does)"]
