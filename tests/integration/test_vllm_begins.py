"""What is looked at before vLLM is started: its arguments by its own parser, this machine's GPUs and who has which.

Interpreters that have vLLM are stand-ins here; tests/vllm asks vLLM's own.
"""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli.main import app
from opengyre.cli.stack import StackError
from opengyre.host import vllm_arguments
from opengyre.host.vllm_arguments import VllmArgumentsError, checked_arguments
from opengyre.host.vllm_process import SIDE
from opengyre.shared.vllm import VllmMissingError

USAGE = "echo 'usage: vllm [-h]' >&2; echo 'vllm: error: unrecognized arguments: --frobnicate' >&2; exit 2"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that commands begin in, on a machine without a GPU."""
    for name in [name for name in os.environ if name.startswith("GYRE_HOST__")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def program(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def python(path: Path, answer: str, memory: str = "echo 85899345920") -> str:
    """One that has vLLM, answers so of arguments, and so of a GPU's memory."""
    return program(
        path, f'case "$*" in -m*) {answer};; *find_spec*) echo True;; *mem_get_info*) {memory};; *) exit 9;; esac'
    )


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, StackError), done.output
    return str(done.exception)


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--engine", "vllm"),
        ("demo", "--headless", "--engine", "vllm"),
        ("bench", "router", "--engine", "vllm"),
        ("bench", "engine"),
    ],
    ids=" ".join,
)
def test_arguments_that_vllm_or_a_host_does_not_take_are_refused_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Path, command: tuple[str, ...]
) -> None:
    """Of `--frobnicate` vLLM died at each start, and was started again for ever."""
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", python(tmp_path / "strict", USAGE))
    monkeypatch.setenv("GYRE_HOST__VLLM_ARGUMENTS", '["--frobnicate"]')
    assert refused(*command) == (
        "vLLM refuses host.vllm_arguments (vllm: error: unrecognized arguments: --frobnicate); "
        "allowed are arguments of its server, `vllm serve`"
    )
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", python(tmp_path / "mild", "echo '[\"max_model_len\"]'"))
    monkeypatch.setenv("GYRE_HOST__VLLM_ARGUMENTS", "--max-model-len,40")
    assert refused(*command).startswith("host.vllm_arguments has --max-model-len, which a host takes from")
    assert not list(here.iterdir())


def test_arguments_are_asked_of_vllm_s_python_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the server's environment, once a command, and not at all where there are none."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    kept = tmp_path / "kept"
    asked = python(tmp_path / "python", f'echo "$PYTHONPATH" "$@" >> {kept}; echo WARNING; echo \'["seed"]\'')
    checked_arguments(asked, ())
    assert not kept.exists()
    for _ in range(2):
        checked_arguments(asked, ("--seed", "4 5"))
    assert kept.read_text() == f"{SIDE} -m gyre_vllm_arguments --seed 4 5\n"


@pytest.mark.parametrize(
    ("arguments", "answer", "said"),
    [
        (("--help",), "echo 'usage: vllm'", r"serves nothing with host.vllm_arguments \(--help\)"),
        (("--help",), ":", r"serves nothing with host.vllm_arguments \(--help\)"),
        (("--seed", "4"), "exit 3", r"refuses host.vllm_arguments \(status 3\)"),
        (("--seed", "--"), "echo '[]'", "host.vllm_arguments has --, after which"),
        # The parser reads the file in place of its name, which it then does not say.
        (("--config", "file.yaml"), "echo '[\"seed\"]'", "host.vllm_arguments has --config, with which"),
    ],
)
def test_what_sets_nothing_or_hides_what_it_sets_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], answer: str, said: str
) -> None:
    with pytest.raises(VllmArgumentsError, match=said):
        checked_arguments(python(tmp_path / "python", answer), arguments)


def test_a_parser_that_does_not_answer_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "ASK_S", 0.1)
    with pytest.raises(VllmMissingError, match=r"python does not say what host.vllm_arguments set"):
        checked_arguments(program(tmp_path / "python", "exec sleep 60"), ("--seed", "4"))


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("ModuleNotFoundError: No module named 'vllm.entrypoints.launchers'", True),
        ("ImportError: cannot import name 'make_arg_parser' from 'vllm.entrypoints.x' (/v/x.py)", True),
        ("ModuleNotFoundError: No module named 'torch'", False),
    ],
)
def test_another_version_of_vllm_is_not_asked(tmp_path: Path, line: str, passes: bool) -> None:
    asked = python(tmp_path / "python", f'echo "{line}" >&2; exit 1')
    if passes:
        checked_arguments(asked, ("--frobnicate",))
        return
    with pytest.raises(VllmArgumentsError, match="No module named 'torch'"):
        checked_arguments(asked, ("--frobnicate",))
