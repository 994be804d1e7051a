"""What arguments set is what vLLM's own parser says, and the names that are a host's own are its names."""

import os
import subprocess

import pytest

from opengyre.host.vllm_arguments import OWN, VllmArgumentsError, checked_arguments
from opengyre.shared.vllm import interpreter, own_environment

NAMES = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(*(action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions))
"""


def python() -> str:
    return interpreter(os.environ.get("GYRE_HOST__VLLM_PYTHON"))


def test_a_host_s_own_names_are_those_of_the_installed_vllm() -> None:
    done = subprocess.run(
        [python(), "-c", NAMES], env=own_environment(), capture_output=True, text=True, check=True, timeout=120
    )
    assert OWN.keys() - set(done.stdout.splitlines()[-1].split()) == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
        (("--max-model", "40"), "has --max-model-len, which a host takes from host.vllm_context"),  # abbreviated
        (("-tp", "2"), "has --tensor-parallel-size, which a host takes from host.vllm_tensor_parallel"),
        (("--enforce-eager", "foo"), "has the name of a model"),
        (("--help",), "serves nothing"),
        (("--no-enforce-eager", "--seed=0", "--kv-cache-dtype", "auto"), None),
    ],
)
def test_vllm_says_what_arguments_set(arguments: tuple[str, ...], said: str | None) -> None:
    if said is None:
        checked_arguments(python(), arguments)
        return
    with pytest.raises(VllmArgumentsError, match=said):
        checked_arguments(python(), arguments)
