"""``task.toml`` of every version, and ``task.yaml``: what is read, and the sentence for what is not."""

import pytest

from opengyre.tasks.config import read_config, resolve
from opengyre.tasks.errors import TaskError
from opengyre.tasks.terminal_bench import read_bench_config, read_pytest_summary


def test_a_file_of_1_0_is_read_with_its_older_spellings() -> None:
    found = read_config(
        """
        version = "1.0"
        [environment]
        memory = "2G"
        storage = "10240M"
        allow_internet = false
        [agent]
        timeout_sec = 120.0
        """
    )
    assert found.schema_version == "1.0"
    assert found.environment.memory_mb == 2048
    assert found.environment.storage_mb == 10240
    assert found.environment.network == "no-network"
    assert found.verifier.timeout_sec == 600.0
    assert found.verifier.mode == "shared"
    assert found.task is None


def test_a_newer_spelling_wins_over_an_older_one() -> None:
    found = read_config(
        '[environment]\nmemory = "1G"\nmemory_mb = 512\nallow_internet = true\nnetwork_mode = "no-network"'
    )
    assert found.environment.memory_mb == 512
    assert found.environment.network == "no-network"


def test_a_file_of_1_4_is_read_whole_and_unknown_keys_are_tolerated() -> None:
    found = read_config(
        """
        schema_version = "1.4"
        source = "somewhere"
        artifacts = ["/workspace", {source = "/logs/x", exclude = ["*.pyc"], service = "main"}]
        multi_step_reward_strategy = "final"
        tomorrow = 7
        [task]
        name = "org/name"
        version = "2"
        authors = [{name = "A", email = "a@b"}]
        keywords = ["k"]
        [metadata]
        difficulty = "hard"
        [agent]
        user = "candidate"
        network_mode = "allowlist"
        allowed_hosts = ["*.example.org"]
        [verifier]
        user = 0
        env = {KEY = "${SECRET:-none}"}
        [verifier.environment]
        docker_image = "v:1"
        [[verifier.collect]]
        command = "/app/collect.sh"
        [environment]
        cpus = 2
        gpus = 1
        tpu = {type = "v5", topology = "2x2"}
        mcp_servers = [{name = "m", transport = "stdio", command = "c", args = ["a"]}]
        healthcheck = {command = "true"}
        workdir = "/app"
        [environment.later]
        x = 1
        [solution]
        env = {A = "b"}
        [[steps]]
        name = "one"
        min_reward = 0.5
        [[steps]]
        name = "two"
        min_reward = {correctness = 1.0}
        [steps.verifier]
        timeout_sec = 30
        """
    )
    assert [item.source for item in found.artifacts] == ["/workspace", "/logs/x"]
    assert found.verifier.mode == "separate"
    assert found.verifier.collect[0].timeout_sec == 60
    assert found.environment.healthcheck is not None
    assert found.environment.healthcheck.retries == 3
    assert [step.min_reward for step in found.steps] == [0.5, {"correctness": 1.0}]
    assert found.steps[1].verifier.timeout_sec == 30
    assert found.agent.user == "candidate"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = ", "not valid TOML"),
        ('version = "9.9"', "schema_version is '9.9': allowed are 1.0, 1.1, 1.2, 1.3, 1.4"),
        ('[task]\nname = "x"', "task.name is 'x': allowed is organisation/name"),
        ('[task]\nversion = "x"', "task.name is missing"),
        ("[environment]\nmemory_mb = -1", "environment.memory_mb is -1"),
        ('[environment]\nmemory = "much"', "memory is 'much'; allowed is a size"),
        ("[environment]\nallow_internet = 3", "allow_internet is no truth value"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec is nan"),
        ('[agent]\nallowed_hosts = ["a"]', "allowed is that with network_mode = 'allowlist' only"),
        ('[[steps]]\nname = "../x"', "steps.0.name is '../x'"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "a"', "two steps share a name"),
        ('environment = "x"', "environment is 'x'"),
    ],
)
def test_a_broken_file_is_one_sentence_with_its_field(text: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_config(text, "t/task.toml")
    assert str(caught.value).startswith("t/task.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_take_what_is_outside_or_their_default() -> None:
    env = {"A": "${KEY}/x", "B": "${OTHER:-d}", "C": "${EMPTY:-}", "D": "$KEY"}
    assert resolve("verifier.env", env, {"KEY": "k"}) == {"A": "k/x", "B": "d", "C": "", "D": "$KEY"}
    with pytest.raises(TaskError, match=r"verifier.env wants \$\{KEY\}; set KEY"):
        resolve("verifier.env", env, {})


def test_a_task_of_terminal_bench_1_is_read() -> None:
    found = read_bench_config("instruction: |-\n  Do it.\ndifficulty: easy\ntags: [a, b]\nextra: 1\n")
    assert found.instruction == "Do it."
    assert found.max_test_timeout_sec == 60


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "holds no mapping"),
        ("author_name: x", "instruction is missing"),
        ("instruction: x\nparser_name: swebench", "parser_name is 'swebench'; allowed is 'pytest'"),
        ("instruction: x\nmax_agent_timeout_sec: -3", "max_agent_timeout_sec is -3"),
    ],
)
def test_a_broken_task_yaml_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_bench_config(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_summary_of_pytest_is_what_counts() -> None:
    printed = """
PASSED of something else
=========================== short test summary info ============================
PASSED tests/test_a.py::test_old
============================== 1 passed in 0.01s ===============================
\x1b[36m=========================== short test summary info ============================\x1b[0m
\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_one\x1b[0m
PASSED tests/test_a.py::test_two[a - b]
SKIPPED [1] tests/test_a.py:3: not here
FAILED tests/test_a.py::test_three - AssertionError: PASSED
ERROR tests/test_b.py
========================= 2 passed, 1 failed in 0.01s ==========================
"""
    report = read_pytest_summary(printed)
    assert [test.name for test in report.tests if test.outcome == "passed"] == [
        "tests/test_a.py::test_one",
        "tests/test_a.py::test_two[a - b]",
    ]
    assert [test.name for test in report.tests if test.outcome == "failed"] == [
        "tests/test_a.py::test_three",
        "tests/test_b.py",
    ]
    assert (report.passed, report.total) == (2, 4)


@pytest.mark.parametrize("printed", ["", "==== short test summary info ====\nnothing\n", "PASSED a::b"])
def test_output_without_a_summary_is_a_fault_and_not_a_zero(printed: str) -> None:
    with pytest.raises(TaskError, match="-rA"):
        read_pytest_summary(printed)
