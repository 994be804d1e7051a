"""One long execution made into a tree, in a process of its own: `python -m opengyre.cli.bench_trajectory_tree`.

Memory is the process's peak over what the raw calls took, so nothing else may have run in it.
"""

import resource
import subprocess
import sys
import time

import msgspec

from opengyre.cli.bench_trajectory_load import Shape, execution
from opengyre.trees import Builder, Given

MILLION = Shape(1_000_000, 700)


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """`raw_mb`: the prompts and completions as they came. `above_raw_mb`: what the tree took beside them, at the peak.
    `add_s`: taking the calls; `tree_s`: lineage and classes; `processor_s`: both, of processor time, which
    `tokens_per_s` (new tokens a second of a core) is told by."""

    factor: int
    form: str
    new_tokens: int
    calls: int
    path_tokens: int
    raw_mb: float
    above_raw_mb: float
    add_s: float
    tree_s: float
    processor_s: float
    tokens_per_s: int
    transitions: dict[str, int]


def measure(factor: int, form: str) -> TreeRow:
    """`form`: `arrays` (int32), `lists` (of Python's integers) or `new` (only what is new since the parent)."""
    calls = list(execution(MILLION.times(factor)))
    if form == "lists":
        calls = [Given(c.call, list(map(int, c.prompt)), list(map(int, c.sampled)), order=c.order) for c in calls]
    elif form == "new":
        calls = shortened(calls)
    raw = sum(len(call.prompt) + len(call.sampled) for call in calls) * 4
    before = _peak_mb()
    started, processor = time.perf_counter(), time.process_time()
    builder = Builder()
    for call in calls:
        builder.add(call)
    added = time.perf_counter()
    tree = builder.tree()
    ended, processor = time.perf_counter(), time.process_time() - processor
    figures = tree.figures
    return TreeRow(
        factor=factor,
        form=form,
        new_tokens=figures.unique_nodes,
        calls=figures.calls,
        path_tokens=figures.path_tokens,
        raw_mb=round(raw / 1e6, 1),
        above_raw_mb=round(_peak_mb() - before, 1),
        add_s=round(added - started, 3),
        tree_s=round(ended - added, 3),
        processor_s=round(processor, 3),
        tokens_per_s=round(figures.unique_nodes / processor),
        transitions=figures.transitions,
    )


def shortened(calls: list[Given]) -> list[Given]:
    """The same calls with what is new since the call that shares most with each, as an endpoint writes them."""
    builder = Builder()
    for call in calls:
        builder.add(call)
    found: list[Given] = []
    for node, call in zip(builder.tree().nodes, calls, strict=True):
        parent = node.related.call if node.related is not None and node.offset else None
        new = call.prompt[node.offset :].copy() if parent else call.prompt  # type: ignore[union-attr]  # prompts of this bench are arrays
        found.append(Given(call.call, new, call.sampled, parent, node.offset if parent else None, call.order))
    return found


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def in_a_process(factor: int, form: str) -> TreeRow:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "opengyre.cli.bench_trajectory_tree", str(factor), form]
    done = subprocess.run(command, capture_output=True, check=True, timeout=600)
    return msgspec.json.decode(done.stdout, type=TreeRow)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure(int(sys.argv[1]), sys.argv[2])))
