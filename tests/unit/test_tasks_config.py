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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("schema_version = 1.0", "schema_version is 1.0: Input should be a valid string"),
        ("source = 3", "source is 3"),
        ('artifacts = "x"', "artifacts is 'x': Input should be a list"),
        ('artifacts = ["rel"]', "artifacts.0.source is 'rel': allowed is an absolute path without '..'"),
        ('artifacts = [{source = "/a/../b"}]', "artifacts.0.source is '/a/../b'"),
        ('artifacts = ["/"]', "artifacts.0.source is '/': allowed is a path that has nothing of /tests"),
        ('artifacts = ["/tests/x"]', "artifacts.0.source is '/tests/x'"),
        ('artifacts = [{exclude = ["x"]}]', "artifacts.0.source is missing"),
        ('artifacts = [{source = "/a", exclude = "x"}]', "artifacts.0.exclude is 'x': Input should be a list"),
        ("artifacts = [3]", "artifacts.0 is 3: Input should be a table of Artifact"),
        (
            'multi_step_reward_strategy = "max"',
            "multi_step_reward_strategy is 'max': Input should be 'mean' or 'final'",
        ),
        ("steps = 3", "steps is 3: Input should be a list"),
        ("steps = [{}]", "steps.0.name is missing"),
        ('steps = [{name = "a", min_reward = "x"}]', "steps.0.min_reward is 'x'"),
        ('steps = [{name = "a", min_reward = nan}]', "steps.0.min_reward is nan: Input should be a finite number"),
        ('steps = [{name = "a", min_reward = {b = "x"}}]', "steps.0.min_reward: Input should be a valid number"),
        (
            'steps = [{name = "a", agent = {timeout_sec = 0}}]',
            "steps.0.agent.timeout_sec is 0: Input should be greater than 0",
        ),
        ('steps = [{name = "a", healthcheck = {}}]', "steps.0.healthcheck.command is missing"),
        ('task = {name = "a/b", authors = [{}]}', "task.authors.0.name is missing"),
        ('task = {name = "a/b", keywords = "x"}', "task.keywords is 'x': Input should be a list"),
        ("metadata = 3", "metadata is 3: Input should be a table"),
        ("agent = {timeout_sec = -1}", "agent.timeout_sec is -1: Input should be greater than 0"),
        ("agent = {timeout_sec = inf}", "agent.timeout_sec is inf: Input should be a finite number"),
        ("agent = {user = -1}", "agent.user is -1: allowed is the name of a user or a number of 0 or more"),
        ("agent = {user = true}", "agent.user is True"),
        ('agent = {user = ""}', "agent.user is ''"),
        (
            'agent = {network_mode = "x"}',
            "agent.network_mode is 'x': Input should be 'public', 'no-network' or 'allowlist'",
        ),
        (
            'agent = {network_mode = "allowlist", allowed_hosts = ["a b"]}',
            "agent.allowed_hosts.0 is 'a b': allowed are a host name",
        ),
        ("verifier = {env = {A = 1}}", "verifier.env.A is 1: Input should be a valid string"),
        ('verifier = {environment_mode = "x"}', "verifier.environment_mode is 'x'"),
        ('verifier = {environment_mode = "shared", environment = {}}', "allowed is it with 'separate' only"),
        ("verifier = {environment = {cpus = 0}}", "verifier.environment.cpus is 0: Input should be greater than 0"),
        ("verifier = {collect = [{}]}", "verifier.collect.0.command is missing"),
        ('verifier = {collect = [{command = ""}]}', "verifier.collect.0.command is ''"),
        ('verifier = {collect = [{command = "x", timeout_sec = 0}]}', "verifier.collect.0.timeout_sec is 0"),
        ("environment = {build_timeout_sec = 0}", "environment.build_timeout_sec is 0"),
        ('environment = {docker_image = ""}', "environment.docker_image is ''"),
        ('environment = {os = "mac"}', "environment.os is 'mac'"),
        ('environment = {cpus = "x"}', "environment.cpus is 'x'"),
        ("environment = {cpus = -1}", "environment.cpus is -1"),
        ("environment = {memory_mb = 0}", "environment.memory_mb is 0"),
        ("environment = {memory_mb = 1.5}", "environment.memory_mb is 1.5"),
        ('environment = {memory = "0"}', "memory is '0'; allowed is a size"),
        ('environment = {storage = "x"}', "storage is 'x'; allowed is a size"),
        ("environment = {storage_mb = -5}", "environment.storage_mb is -5"),
        ("environment = {gpus = -1}", "environment.gpus is -1"),
        ('environment = {gpu_types = "x"}', "environment.gpu_types is 'x': Input should be a list"),
        ("environment = {tpu = {}}", "environment.tpu.type is missing"),
        ('environment = {mcp_servers = [{name = "a", transport = "stdio"}]}', "transport is 'stdio' without command"),
        ('environment = {mcp_servers = [{name = "a", transport = "x"}]}', "environment.mcp_servers.0.transport is 'x'"),
        ("environment = {skills_dir = 3}", "environment.skills_dir is 3"),
        ('environment = {healthcheck = {command = "x", retries = 0}}', "environment.healthcheck.retries is 0"),
        (
            'environment = {healthcheck = {command = "x", interval_sec = -1}}',
            "environment.healthcheck.interval_sec is -1",
        ),
        ('environment = {workdir = "rel"}', "environment.workdir is 'rel': allowed is an absolute path"),
        ('environment = {network_mode = "none"}', "environment.network_mode is 'none': Input should be 'public'"),
        (
            'environment = {allowed_hosts = ["x"]}',
            "allowed_hosts is set; allowed is that with network_mode = 'allowlist' only",
        ),
        ("solution = {env = 3}", "solution.env is 3: Input should be a table"),
    ],
)
def test_a_bad_value_of_any_field_is_one_sentence_that_names_it(line: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_config(line, "t/task.toml")
    said = str(caught.value)
    assert said.startswith("t/task.toml: ")
    assert words in said
    assert "\n" not in said


def test_what_a_step_sets_is_over_what_its_task_sets() -> None:
    found = read_config(
        """
        [verifier]
        environment_mode = "separate"
        [[steps]]
        name = "a"
        [steps.verifier]
        environment_mode = "shared"
        [[steps]]
        name = "b"
        """
    )
    assert [step.verifier.said for step in found.steps] == ["shared", None]
    assert found.verifier.mode == "separate"


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
