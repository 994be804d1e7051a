"""What the demo runs: its policy's warm start, its tasks, its run. Everything follows from its options."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from opengyre import shelltasks, tiny
from opengyre.proto.run import Dispatch, Elastic, Harness, Optimization, RunSpec, Scoring
from opengyre.proto.task import TaskSpec
from opengyre.shelltasks.tasks import generate

EVALUATION_TASKS = 96
VLLM_DWELL_S = 20.0


@dataclass(frozen=True)
class DemoOptions:
    updates: int = 64
    hosts: int = 2
    seed: int = 1
    out: Path = Path("runs/demo")
    state_dir: Path = Path("runs/demo/state")
    cache: Path = Path("runs/cache")
    engine: Literal["tiny", "vllm"] = "tiny"
    keep: bool = False
    """Go on from the state directory as it is."""
    attach: str | None = None
    """Gateway of a stack that runs already."""
    api_key: str | None = None
    evaluation_tasks: int = EVALUATION_TASKS


def run_spec(options: DemoOptions, run: str, model: Path) -> RunSpec:
    """The settings that the demo's promises were measured with."""
    return RunSpec(
        run=run,
        model=str(model),
        updates=options.updates,
        seed=options.seed,
        dispatch=Dispatch(phi=0.5, mu=2, batch_groups=8, group_size=8, min_members=2),
        harness=Harness(max_tokens=32),
        # Above this rate a policy of this size, trained one version behind, does not learn.
        optimization=Optimization(learning_rate=2e-4),
        # Apart from the agent an evaluation takes 40 ms of a core instead of 13: at 14 episodes a second a fifth of two
        # cores. A warm-started agent of one-line commands does not plant files for its checks.
        scoring=Scoring(grading="shared"),
        # On a CPU vLLM is ended and started again at each switch, in a quarter of a minute.
        elastic=Elastic() if options.engine == "tiny" else Elastic(dwell_s=VLLM_DWELL_S),
    )


def tasks(options: DemoOptions, spec: RunSpec) -> list[TaskSpec]:
    """The tasks to train on, one group each."""
    wanted = options.updates * spec.dispatch.batch_groups
    return [named(generate("train", i, options.seed), f"train_{i:05d}") for i in range(wanted)]


def evaluation(options: DemoOptions, phase: Literal["before", "after"]) -> list[TaskSpec]:
    """Held-out tasks, made of words and names that training never sees; the same ones in both phases."""
    return [
        msgspec.structs.replace(
            named(generate("eval", i, options.seed), f"{phase}_{i:05d}"), purpose="evaluate", repeat=1
        )
        for i in range(options.evaluation_tasks)
    ]


def named(task: TaskSpec, name: str) -> TaskSpec:
    return msgspec.structs.replace(task, task=name)


SAMPLING = {"engine.py", "core.py", "kernel.py", "sampling.py", "state.py", "types.py"}
"""Modules of `opengyre.tiny` that only generate: they have no part in what behaviour cloning makes."""


def warm_start_name(seed: int) -> str:
    """Name of the model directory: it changes with whatever makes the model."""
    digest = hashlib.sha256(str(seed).encode())
    for package in (shelltasks, tiny):
        for folder in package.__path__:
            for path in sorted(path for path in Path(folder).glob("*.py") if path.name not in SAMPLING):
                digest.update(path.name.encode() + path.read_bytes())
    return f"warmstart-{digest.hexdigest()[:16]}"
