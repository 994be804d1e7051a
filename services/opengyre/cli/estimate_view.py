"""An estimate as tables."""

from rich.console import RenderableType
from rich.table import Table

from opengyre.cli.estimate import Estimate
from opengyre.sizing.hardware import GIB


def shown(found: Estimate) -> list[RenderableType]:
    """Memory by role, time by phase, and the assumptions, in order."""
    return [_memory(found), _time(found), *(f"assumed: {sentence}" for sentence in found.assumptions), *found.notes]


def _memory(found: Estimate) -> Table:
    serving, training, trainer = found.serving, found.training, found.trainer
    table = Table("role", "what", "GiB", title=f"memory, {found.hardware} ({found.parameters:,} parameters)")
    calls = f"{serving.kv_tokens:,} tokens, {serving.full_calls:,} calls of the whole context"
    rows = (
        (f"serving cell ({serving.engine})", f"weights, {serving.dtype}", serving.weights),
        ("", f"keys and values: {calls}", serving.kv),
        ("training process", "weights, float32", training.weights),
        ("", "sum of gradients", training.gradients),
        ("", "keys, values and their gradients of the longest path" + _offloaded(training.offloaded), training.path),
        ("", "graph of one chunk", training.chunk),
        ("", f"in all, of {found.memory_bytes / GIB:.1f}", training.total),
        ("trainer (main memory)", "weights, float32", trainer.weights),
        ("", "optimizer", trainer.optimizer),
        ("", "sum of contributions", trainer.gradients),
    )
    for role, what, size in rows:
        table.add_row(role, what, f"{size / GIB:.3g}")
    return table


def _offloaded(offloaded: bool) -> str:
    return ", in main memory" if offloaded else ""


def _time(found: Estimate) -> Table:
    t = found.times
    table = Table("phase", "cells", "s", "what", title="time of an update, at its budgets")
    what = f"{t.calls} calls at once and {t.tokens_per_s:,.0f} tokens/s a cell"
    table.add_row("rollout", f"{t.rollout_cells:.2g}", f"{t.rollout_s:.3g}", what)
    table.add_row(
        "training", f"{t.train_cells:.2g}", f"{t.train_s:.3g}", f"{t.train_unshared_s:.3g} if executions share nothing"
    )
    table.add_row("switches", "", f"{t.switches_s:.3g}", f"{t.switch_s:.3g} s of a cell, there and back")
    table.add_row("update", "", f"{t.update_s:.3g}", "")
    return table
