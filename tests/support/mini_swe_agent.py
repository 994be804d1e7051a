"""mini-swe-agent as PyPI has it, in a folder that sandboxes can show, and a policy that can drive it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from opengyre.shelltasks.clone import CloneSettings, clone, example
from opengyre.shelltasks.demonstrate import Demonstration, Turn
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.tiny.tokenizer import TinyTokenizer

VERSION = "2.4.6"
# What it imports when it runs a task here; its own list has the datasets of its benchmarks as well.
NEEDS = (
    "litellm", "openai", "pyyaml", "requests", "jinja2", "pydantic", "tenacity", "rich", "python-dotenv", "typer",
    "platformdirs", "textual", "prompt_toolkit",
)  # fmt: skip
PYTHON = Path("/usr/bin/python3")
PLACE = "/opt/agents"
INSTALL_S = 400
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CONFIG = """
agent:
  system_template: "shell"
  instance_template: "{{task}}"
  step_limit: 6
  cost_limit: 0
model:
  observation_template: "{{output.output}}"
  format_error_template: "no command"
  cost_tracking: ignore_errors
  model_kwargs:
    drop_params: true
"""
LINE = f"""
export PYTHONPATH={PLACE} PYTHONDONTWRITEBYTECODE=1 MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1
export MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini LITELLM_LOCAL_MODEL_COST_MAP=True
python3 -m minisweagent.run.mini -c mini.yaml -y --exit-immediately \\
  -m openai/"$GYRE_MODEL" -t "$GYRE_INSTRUCTION" -o /logs/mini.json
"""


def installed() -> Path:
    """The folder, made when it is not there; skips the test, with the reason, where it cannot be had."""
    folder = Path(tempfile.gettempdir()) / f"gyre-mini-swe-agent-{VERSION}"
    if folder.exists():
        return folder
    if not PYTHON.exists() or _version(str(PYTHON)) != _version(sys.executable):
        pytest.skip(f"mini-swe-agent runs in sandboxes, which see {PYTHON}; it must be the tests' version of Python")
    made = Path(tempfile.mkdtemp(prefix="gyre-mini-"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(made)]
    try:
        for packages in (["--no-deps", f"mini-swe-agent=={VERSION}"], list(NEEDS)):
            done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode != 0:
                pytest.skip(f"mini-swe-agent {VERSION} cannot be installed: {done.stderr[-300:]}")
        made.chmod(0o755)
        with contextlib.suppress(OSError):  # another test run was first
            made.rename(folder)
    except subprocess.TimeoutExpired:
        pytest.skip(f"mini-swe-agent {VERSION} was not installed within {INSTALL_S} s")
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _version(python: str) -> str:
    code = "import sys; print(sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}).stdout


def policy(folder: Path, instruction: str, *episodes: tuple[str, ...]) -> Path:
    """A model directory that says the commands of one of `episodes`, each as often, when it is given `instruction`.

    Cloned from these alone, in seconds: it knows nothing else.
    """
    shown = [
        Demonstration(f"shell<>{instruction}", tuple(Turn(command, "") for command in commands), right=True)
        for commands in episodes
    ]
    texts = [f" {message['content']}" for one in shown for message in one.messages()]
    tokenizer = TinyTokenizer.train([*texts, " shell", f" {instruction}"], 300)
    model = TinyModel(TinyConfig(tokenizer.vocab_size, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.end_id), 1)

    class Told(Demonstration):
        def messages(self) -> list[dict[str, str]]:
            talk = Demonstration.messages(self)[1:]
            return [{"role": "system", "content": "shell"}, {"role": "user", "content": instruction}, *talk]

    examples = [example(tokenizer, Told(one.instruction, one.turns, one.right)) for one in shown]
    clone(model, examples * 4, CloneSettings(steps=60, batch=4 * len(examples)), 1)
    path = folder / "policy"
    tokenizer.save(path)
    save_pretrained(model, path)
    return path
