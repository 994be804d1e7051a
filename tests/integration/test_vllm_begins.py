"""What is looked at before vLLM is started: its arguments by its own parser, this machine's GPUs and who has which.

Interpreters that have vLLM are stand-ins here; tests/vllm asks vLLM's own.
"""

import os
import sys
from pathlib import Path

import pytest

from opengyre.cli import up as stack_up
from opengyre.cli.stack import StackError
from opengyre.cli.up import Options, compose
from opengyre.host import vllm_arguments
from opengyre.host.vllm_arguments import VllmArgumentsError, checked_arguments
from opengyre.host.vllm_machine import gpu_memory
from opengyre.host.vllm_process import SIDE
from opengyre.shared.settings import load
from opengyre.shared.vllm import VllmMissingError
from opengyre.tiny.types import EngineError
from support.vllm_stand_ins import COMMANDS, program, refused

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


def python(path: Path, answer: str, memory: str = "echo 85899345920") -> str:
    """One that has vLLM, answers so of arguments, and so of a GPU's memory."""
    return program(
        path, f'case "$*" in -m*) {answer};; *find_spec*) echo True;; *mem_get_info*) {memory};; *) exit 9;; esac'
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
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


def test_hosts_of_a_stack_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", python(tmp_path / "python", "exit 9"))
    monkeypatch.setenv("GYRE_HOST__VLLM_TENSOR_PARALLEL", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,GPU-5c1e,7,8")

    def told(options: Options) -> list[str | None]:
        _, _, above = compose(options, load())
        return [one.environment.get("CUDA_VISIBLE_DEVICES") for one in above if one.name.startswith("host")]

    assert told(Options(tmp_path / "state", hosts=2, engine="vllm")) == ["2,3", "GPU-5c1e,7"]
    assert told(Options(tmp_path / "state", hosts=2)) == [None, None]
    with pytest.raises(
        StackError, match=r"^--hosts is 3, each with 2 GPUs of its own; this machine has 5 GPUs, so allowed are"
    ):
        compose(Options(tmp_path / "state", hosts=3, engine="vllm"), load())
    monkeypatch.setattr(stack_up, "free_memory", lambda: 64 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told(Options(tmp_path / "state", hosts=3, engine="vllm")) == [None, None, None]


TORCH = "echo 'Traceback (most recent call last):' >&2; echo 'RuntimeError: No CUDA GPUs are available' >&2; exit 1"
WOULD = (
    "a CUDA build of vLLM that finds the GPU would do, or CUDA_VISIBLE_DEVICES set to nothing, to serve on processors"
)


def test_a_vllm_that_does_not_use_the_gpus_says_why_and_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """It said "returned non-zero exit status 1", and each host after it was started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for_processors = python(tmp_path / "python", "exit 9", "echo none")
    with pytest.raises(EngineError) as error:
        gpu_memory(for_processors)
    assert str(error.value) == (
        f"this machine has GPUs, and the vLLM of {for_processors} (host.vllm_python) is built for processors; {WOULD}"
    )
    broken = python(tmp_path / "broken", "exit 9", TORCH)
    with pytest.raises(EngineError) as other:
        gpu_memory(broken)
    assert str(other.value) == (
        f"{broken} (host.vllm_python) does not say how much memory the GPU has "
        f"(RuntimeError: No CUDA GPUs are available); {WOULD}"
    )
    assert gpu_memory(python(tmp_path / "fitting", "exit 9")) == 85899345920
    monkeypatch.setenv("GYRE_HOST__VLLM_PYTHON", for_processors)
    for command in (("up",), ("demo", "--headless")):
        assert refused(*command, "--engine", "vllm", "--hosts", "1") == str(error.value)
    assert not list(here.iterdir())


@pytest.mark.torch
def test_a_torch_for_processors_is_known_by_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="it is a torch without CUDA that is asked")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(EngineError, match="is built for processors"):
        gpu_memory(sys.executable)
