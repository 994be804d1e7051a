"""What a bound on paths costs and saves: the same executions under several `j_max`, trained by the tiny policy.

The time is that of the gradient, by the trainer's own code, on one thread; the model is as small as the demo's.
"""

import time

import msgspec
import torch

from opengyre.cli.bench_trajectory_events import Ids, calls_of
from opengyre.cli.bench_trajectory_load import Shape
from opengyre.learn.gradient import GradientStats, Item, accumulate, zero_gradients
from opengyre.proto.group import Sequence, Span
from opengyre.proto.run import Sampling
from opengyre.proto.traj import Call
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.trajectory.tree import paths, tree_of

VOCABULARY = 300
EXECUTION = Shape(12_000, 84, sub_agents=6, compactions=3, vocabulary=VOCABULARY)


class PathsRow(msgspec.Struct, frozen=True, kw_only=True):
    """`row_tokens`: what goes through the model. `share`: of the uncapped row's time."""

    bound: str
    paths: int
    trained_tokens: int
    sampled_tokens: int
    row_tokens: int
    seconds: float
    share: float = 1.0


def measure(executions: int, repeats: int = 1) -> list[PathsRow]:
    torch.set_num_threads(1)
    logs = [calls_of(EXECUTION, seed, Ids("r", "g", f"e{seed}")) for seed in range(executions)]
    config = TinyConfig(
        VOCABULARY, 64, num_attention_heads=4, intermediate_size=128, num_hidden_layers=2,
        max_position_embeddings=32_768, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = TinyModel(config, 0)
    sampled = sum(len(call.sampled_ids) for log in logs for call in log)
    rows: list[PathsRow] = []
    for bound in (None, 1, 2, 5):
        found = [s for e, log in enumerate(logs) for s in paths(log, Sampling(j_max=bound), e).sequences]
        rows.append(_row("uncapped" if bound is None else f"{bound}", found, sampled, model, repeats))
    rows.append(_row("no deduplication", [s for log in logs for s in undeduplicated(log)], sampled, model, repeats))
    uncapped = rows[0].seconds
    ordered = (*rows[1:4], rows[0], rows[4])
    return [msgspec.structs.replace(row, share=round(row.seconds / uncapped, 3)) for row in ordered]


def undeduplicated(calls: list[Call]) -> list[Sequence]:
    """A row for each call, with its whole prompt; each trains its own completion."""
    tree, by_name, _ = tree_of(calls)
    return [
        Sequence(
            tokens=tuple(tree.tokens(node).tolist()),
            spans=(
                Span(
                    start=node.start.depth, end=node.length, logprobs=by_name[node.call].logprobs,
                    versions=(0,) * node.events, temperature=1.0,
                ),
            ),
        )
        for node in tree.nodes
    ]  # fmt: skip


def _row(bound: str, sequences: list[Sequence], sampled: int, model: TinyModel, repeats: int) -> PathsRow:
    items = [Item(sequence, 1.0, 1.0) for sequence in sequences]
    best = float("inf")
    stats = GradientStats()
    for _ in range(repeats):
        started = time.perf_counter()
        stats = accumulate(model, items, zero_gradients(model))
        best = min(best, time.perf_counter() - started)
    return PathsRow(
        bound=bound,
        paths=len(sequences),
        trained_tokens=stats.tokens,
        sampled_tokens=sampled,
        row_tokens=sum(len(sequence.tokens) for sequence in sequences),
        seconds=round(best, 3),
    )
