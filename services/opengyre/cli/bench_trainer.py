"""`gyre bench trainer`: the tree's gradient against each path in full, and against a detached prompt, in one run.

Waits: for one measuring process after the other, `BOUND_S` at most each; they end with this one.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
import typer

from opengyre.cli import bench_trainer_facts as facts
from opengyre.cli.bench_options import chosen, tell
from opengyre.cli.bench_trainer_job import Job, Measured, Model
from opengyre.cli.bench_trainer_shapes import Shape
from opengyre.cli.bench_trainer_view import show
from opengyre.cli.client import JsonOption, errors
from opengyre.cli.stack import StackError
from opengyre.cli.supervisor_child import die_with

BOUND_S: Final = 1800.0
CHUNK: Final = 2048
PARTS: Final = {
    "a": "a prefix with branches",
    "b": "a chain",
    "c": "an agent's tree",
    "d": "a prompt with groups",
    "e": "float32 and bfloat16",
}
DEVICES: Final = ("cpu", "cuda")
DTYPES: Final = ("float32", "bfloat16")
CHAIN: Final = {"cpu": 65_536, "cuda": 262_144}
LEAN: Final = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives freed tensors back at once, so that a peak is of what lives, not of where it once lay. It takes time."""
TRIES: Final = 2
"""Of the short part a."""
LEAST: Final = 64
"""Tokens of the longest chain."""
MEMBERS: Final = (2, 4, 8)
WIDE = Model(hidden=128, layers=4, heads=4, head_dim=32, mlp=256)
SMALL = Model(hidden=64, layers=2, heads=2, head_dim=32, mlp=128)
"""Of these two, attention is nearly all of the work: a token of theirs costs what 100 or so attended ones do."""
THIN = Model(hidden=512, layers=1, heads=1, head_dim=32, mlp=1024)
"""A token costs what 26,000 attended ones do; of Qwen3-8B it is 24,000, of larger models more."""
PREFIX = Shape("prefix", leaves=8, prefix=8192, branch=512)
AGENT = Shape("agent", leaves=12, unique=60_000, path=400_000, nodes=200)
PROMPT = Shape("prefix", prefix=32_768, branch=512)
EXACT = Shape("prefix", leaves=4, prefix=1024, branch=128)


def register(bench: typer.Typer) -> None:
    bench.command("trainer")(trainer)


def trainer(
    only: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(PARTS)}.")] = ",".join(PARTS),
    scale: Annotated[float, typer.Option(min=0.01, max=16, help="Times the tokens of every part.")] = 1.0,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens that the tree computes at once; 0: 2048 x scale.")] = 0,
    device: Annotated[str, typer.Option(help=f"One of: {', '.join(DEVICES)}.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of weights, one of: {', '.join(DTYPES)}.")] = "float32",
    chain: Annotated[int, typer.Option(min=0, help="Tokens of b's longest chain; 0: 65536, on cuda 262144.")] = 0,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Of each measurement; 0: one a core.")] = 0,
    json: JsonOption = False,
) -> None:
    """Measure the exact gradient of trees: (a) a prefix with branches, (b) a chain, (c) an agent's tree, each against
    its paths in full; (d) groups on one prompt against a detached prompt; (e) rounding.

    Example: gyre bench trainer --only a,d --scale 0.1
    """
    wanted = chosen("--only", only, PARTS)
    if 0 < chain < LEAST:
        raise StackError(f"--chain is {chain}; allowed are 0 and numbers from {LEAST}")
    for name, value, allowed in (("device", device, DEVICES), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise StackError(f"--{name} is {value!r}; allowed: {', '.join(allowed)}")
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise StackError(f"this measures with {module}; install it with: pip install 'opengyre[trainer,models]'")
    setting = Setting(
        scale, chunk or max(16, round(CHUNK * scale)), device, dtype, threads or cores(),
        chain or round(CHAIN[device] * scale),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as directory:
        found = measure(wanted, setting, Runner(setting, Path(directory)).run)
    tell(found, json, show)


@dataclass(frozen=True, slots=True)
class Setting:
    scale: float
    chunk: int
    device: str
    dtype: str
    threads: int
    chain: int


class Run(Protocol):
    """Measures one way: what was measured, and the gradient. `lean`: for the sake of its memory."""

    def __call__(
        self, part: str, way: str, shape: Shape, model: Model, dtype: str, chunk: int, *, lean: bool = False
    ) -> tuple[Measured, facts.Arrays]: ...


def measure(wanted: list[str], setting: Setting, run: Run) -> facts.Facts:
    """The parts that are wanted, one measurement after the other."""
    began = time.monotonic()
    found = facts.Facts(
        device=setting.device, dtype=setting.dtype, threads=setting.threads, chunk=setting.chunk, scale=setting.scale
    )
    change = msgspec.structs.replace
    if "a" in wanted:
        shape = PREFIX.times(setting.scale)
        found = change(found, prefix=tuple(_against("a", shape, model, setting, run, TRIES) for model in (WIDE, THIN)))
    if "b" in wanted:
        found = change(found, chain=_chain(setting, run))
    if "c" in wanted:
        found = change(found, agent=_against("c", AGENT.times(setting.scale), THIN, setting, run))
    if "d" in wanted:
        found = change(found, group=_group(setting, run))
    if "e" in wanted:
        found = change(found, precision=_precision(run))
    return change(found, seconds=round(time.monotonic() - began, 1))


def _against(part: str, shape: Shape, model: Model, setting: Setting, run: Run, tries: int = 1) -> facts.Against:
    """Of `tries` in turns, the fastest of each way."""
    trees, flats = [], []
    for _ in range(tries):
        trees.append(run(part, "tree", shape, model, setting.dtype, setting.chunk))
        flats.append(run(part, "flat", shape, model, setting.dtype, setting.chunk))
    (tree, mine), (flat, wanted) = (min(found, key=lambda one: one[0].seconds) for found in (trees, flats))
    return facts.against(part, model.text(), tree, flat, facts.apart(mine, wanted))


def _chain(setting: Setting, run: Run) -> facts.Chain:
    shapes = [Shape("chain", unique=setting.chain // part) for part in (4, 2, 1)]
    trees = [run("b", "tree", shape, SMALL, setting.dtype, setting.chunk, lean=True)[0] for shape in shapes]
    last, mine = run("b", "tree", shapes[-1], SMALL, setting.dtype, setting.chunk)
    flat, wanted = run("b", "flat", shapes[-1], SMALL, setting.dtype, setting.chunk)
    beside = facts.against("b", SMALL.text(), last, flat, facts.apart(mine, wanted))
    width = 4 if setting.dtype == "float32" else 2
    return facts.chain(SMALL.text(), trees, SMALL.state_bytes(width), beside)


def _group(setting: Setting, run: Run) -> facts.Group:
    rows = []
    for members in MEMBERS:
        shape = replace(PROMPT.times(setting.scale), leaves=members)
        tree, exact = run("d", "tree", shape, SMALL, setting.dtype, setting.chunk, lean=True)
        detached, other = run("d", "detached", shape, SMALL, setting.dtype, setting.chunk, lean=True)
        rows.append((members, tree, detached, facts.apart(other, exact)))
    size = PROMPT.times(setting.scale)
    return facts.group(SMALL.text(), size.prefix, size.branch, rows)


def _precision(run: Run) -> facts.Precision:
    """The same at every scale: what is exact does not depend on the length."""
    found = {
        (dtype, way): run("e", way, EXACT, WIDE, dtype, EXACT.prefix // 4)
        for dtype in DTYPES
        for way in ("tree", "flat")
    }
    wanted = found["float32", "flat"][1]
    return facts.Precision(
        model=WIDE.text(),
        unique_tokens=found["float32", "tree"][0].unique_tokens,
        float32_tree=facts.apart(found["float32", "tree"][1], wanted),
        bfloat16_tree=facts.apart(found["bfloat16", "tree"][1], wanted),
        bfloat16_flat=facts.apart(found["bfloat16", "flat"][1], wanted),
        bfloat16_tree_flat=facts.apart(found["bfloat16", "tree"][1], found["bfloat16", "flat"][1]),
    )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Runner:
    """Runs jobs in processes of their own, their gradients in files of `directory`."""

    def __init__(self, setting: Setting, directory: Path) -> None:
        self._setting, self._directory = setting, directory

    def run(
        self, part: str, way: str, shape: Shape, model: Model, dtype: str, chunk: int, *, lean: bool = False
    ) -> tuple[Measured, facts.Arrays]:
        """Raises `StackError` where the process fails or takes longer than `BOUND_S`."""
        file = self._directory / "gradient.npz"
        file.unlink(missing_ok=True)
        say = f"{part}, {way}" + (f", {dtype}" if part == "e" else "")
        job = Job(
            way=way, shape=asdict(shape), model=model, chunk=chunk, device=self._setting.device, dtype=dtype,
            threads=self._setting.threads, gradient=str(file), say=say,
        )  # fmt: skip
        measured = msgspec.json.decode(self._output(job, lean), type=Measured)
        errors.print(
            f"{say}: {measured.unique_tokens:,} unique of {measured.path_tokens:,} path tokens in "
            f"{measured.seconds:.2f} s, {measured.peak_bytes / 1e6:.1f} MB above the weights",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        with np.load(file) as gradient:
            return measured, dict(gradient)

    def _output(self, job: Job, lean: bool) -> bytes:
        threads = str(job.threads)
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        if lean:
            environment |= LEAN
        with subprocess.Popen(
            [sys.executable, "-m", "opengyre.cli.bench_trainer_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, start_new_session=True, preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - it takes no lock
        ) as child:  # fmt: skip
            try:
                output, _ = child.communicate(msgspec.json.encode(job), timeout=BOUND_S)
            except subprocess.TimeoutExpired as error:
                raise StackError(f"{job.say}: not done within {BOUND_S:g} s; --scale makes it smaller") from error
            finally:
                child.kill()
        if child.returncode == -signal.SIGKILL:
            raise StackError(f"{job.say}: killed, so memory was too small; --scale makes it smaller")
        if child.returncode:
            raise StackError(f"{job.say}: ended with status {child.returncode}; what it said is above")
        return output
