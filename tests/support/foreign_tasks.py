"""Tasks of others, small ones, written into folders for tests; and the real ones beside the repository."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Where real tasks are looked for unless GYRE_TEST_DATA says otherwise: beside the repository."""


def real_task(name: str) -> Path:
    """A task that others use; the test is skipped where it is not there."""
    folder = Path(os.environ.get("GYRE_TEST_DATA") or BESIDE) / "tasks" / name
    if not (folder / "task.toml").is_file():
        pytest.skip(f"there is no task {folder}; GYRE_TEST_DATA names another folder")
    return folder


def write(folder: Path, files: dict[str, str]) -> Path:
    """The files below a folder; scripts can be executed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder


REWARD = 'mkdir -p /logs/verifier; if [ "$(cat /app/answer 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi'


def harbor(folder: Path, **files: str) -> Path:
    """A task that asks for 42 in /app/answer; ``files`` replace its own, with __ for / and _DOT_ for a dot."""
    plain = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 20.0\n',
        "instruction.md": "Write 42 into /app/answer.\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test.sh": f"#!/bin/sh\n({REWARD}) > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/bash\necho 42 > answer\n",
    }
    plain |= {name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()}
    return write(folder, plain)


PYTEST_TASK = {
    "task.toml": 'schema_version = "1.4"\n[task]\nname = "org/counts"\n[verifier]\ntimeout_sec = 30\n'
    '[environment]\nmemory = "512M"\nstorage = "16M"\nenv = {GREETING = "${NOT_SET_ANYWHERE:-hello}"}\n',
    "instruction.md": "Write double(n) into /app/work.py.\n",
    "environment/Dockerfile": "FROM python:3.12-slim\n"
    "ENV LEVEL=7 PLACE=/app\n"
    "RUN apt-get update && apt-get install -y python3 && rm -rf /var/lib/apt/lists/*\n"
    "RUN pip install pytest==8.4.1\n"
    "WORKDIR $PLACE\n"
    "COPY data/ ./data/\n"
    "COPY --chmod=600 *.cfg /etc/thing/\n"
    "RUN echo $LEVEL > level && test -f data/a.txt && test -f /etc/thing/x.cfg\n"
    'CMD ["bash"]\n',
    "environment/data/a.txt": "a\n",
    "environment/x.cfg": "x\n",
    "tests/test.sh": "#!/bin/bash\n"
    "curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh\n"
    "source $HOME/.local/bin/env\n"
    "uvx --with pytest==8.4.1 --with pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json"
    " /tests/test_work.py -rA\n"
    "if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
    "tests/test_work.py": "import os, pathlib, sys\n"
    "sys.path.insert(0, '/app')\n"
    "def test_the_environment_is_there():\n"
    "    assert pathlib.Path('/app/level').read_text().strip() == '7' and os.environ['GREETING'] == 'hello'\n"
    "def test_small():\n"
    "    from work import double\n    assert double(2) == 4\n"
    "def test_large():\n"
    "    from work import double\n    assert double(10**6) == 2 * 10**6\n",
    "solution/solve.sh": "#!/bin/bash\necho 'def double(n): return 2 * n' > work.py\n",
}

BENCH_TASK = {
    "task.yaml": "instruction: Write 42 into answer.\ndifficulty: easy\nmax_test_timeout_sec: 30\n",
    "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:latest\nWORKDIR /app\nCOPY start.txt .\n",
    "start.txt": "begin\n",
    "run-tests.sh": "#!/bin/bash\nuv init\nuv add pytest==8.4.1\nuv run pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "import pathlib\n"
    "def test_start_is_there():\n    assert pathlib.Path('/app/start.txt').exists()\n"
    "def test_answer():\n    assert pathlib.Path('/app/answer').read_text().strip() == '42'\n",
    "solution.sh": "#!/bin/bash\necho 42 > answer\n",
}

STEPS_TASK = {
    "task.toml": 'schema_version = "1.1"\nmulti_step_reward_strategy = "mean"\n'
    '[[steps]]\nname = "one"\nmin_reward = 1.0\n[[steps]]\nname = "two"\n',
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
    "steps/one/instruction.md": "First.\n",
    "steps/one/tests/test.sh": "#!/bin/sh\n[ -f first ] && echo 1 > /logs/verifier/reward.txt"
    " || echo 0 > /logs/verifier/reward.txt\n",
    "steps/one/solution/solve.sh": "touch first\n",
    "steps/two/instruction.md": "Second.\n",
    "steps/two/workdir/setup.sh": "cp given seen\n",
    "steps/two/workdir/given": "g\n",
    "steps/two/tests/test.sh": "#!/bin/sh\n[ -f first ] && cmp -s second seen && echo 1 > /logs/verifier/reward.txt"
    " || echo 0.5 > /logs/verifier/reward.txt\n",
    "steps/two/solution/solve.sh": "cp given second\n",
}

APART_TASK = {
    "task.toml": 'schema_version = "1.4"\n'
    'artifacts = ["/app/out", {source = "/app/tool", exclude = ["*.log"]}, "/app/no"]\n'
    '[agent]\nuser = "root"\n[verifier]\ntimeout_sec = 30\nenvironment_mode = "separate"\n'
    '[verifier.environment]\nmemory_mb = 256\nenv = {WHERE = "apart"}\n'
    '[verifier.environment.healthcheck]\ncommand = "test -f /checker/ready"\nretries = 1\n'
    '[[verifier.collect]]\ncommand = "mkdir -p /logs/artifacts && cp answer /logs/artifacts/ || true"\n'
    '[environment]\nmcp_servers = [{name = "m", url = "http://m"}]\nskills_dir = "/skills"\n'
    '[environment.healthcheck]\ncommand = "test -f kept && test ! -e left.log"\nretries = 1\n',
    "instruction.md": "Write 42 into /app/answer and a tool into /app/tool.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY . .\n",
    "environment/.dockerignore": "# not for the agent\n*.log\nhidden\n!hidden/shown\nDockerfile\n",
    "environment/kept": "k\n",
    "environment/left.log": "l\n",
    "environment/hidden/secret": "s\n",
    "environment/hidden/shown": "s\n",
    "tests/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /checker\nCOPY . /tests/\nRUN touch ready\n",
    "tests/test.sh": "#!/bin/sh\n"
    "[ $WHERE = apart ] && [ -f ready ] && [ ! -e /app/kept ] && [ ! -e /app/answer ] || exit 1\n"
    "[ ! -e /app/tool/x.log ] && [ ! -L /app/tool/out ] || exit 1\n"
    'if [ "$(cat /logs/artifacts/answer 2>/dev/null)" = 42 ] && [ "$(/app/tool/say 2>/dev/null)" = yes ]\n'
    "then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\nset -e\n"
    "test ! -e left.log; test ! -e hidden/secret; test -e hidden/shown; test ! -e Dockerfile\n"
    "echo 42 > answer; mkdir tool; printf '#!/bin/sh\\necho yes\\n' > tool/say; chmod +x tool/say\n"
    "echo x > tool/x.log; ln -s /etc/passwd tool/out; mkdir -p /tests; echo x > /tests/test.sh\n",
}
"""Its tests have a Dockerfile, and the agent's work comes to them as artifacts."""
