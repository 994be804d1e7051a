"""Tables of what was measured of the trainer."""

from rich.table import Table

from opengyre.cli.bench_trainer_facts import Against, Apart, Chain, Facts, Group, Precision
from opengyre.cli.client import console


def show(found: Facts) -> None:
    console.print(
        f"device {found.device}, {found.dtype}, {found.threads} threads, chunks of {found.chunk} tokens, "
        f"{found.seconds:g} s in all"
    )
    rows = [*found.prefix, found.chain.against if found.chain else None, found.agent]
    if present := [row for row in rows if row is not None]:
        console.print(_times(present))
        console.print(_sizes(present))
    if found.chain is not None:
        console.print(_chain(found.chain))
    if found.group is not None:
        console.print(_group(found.group))
    if found.precision is not None:
        console.print(_precision(found.precision))


def _times(rows: list[Against]) -> Table:
    shown = Table("part", "unique", "path", "tree s", "flat s", "/ flat", "/ ideal", "CPU / ideal", "pairs / ideal")
    for row in rows:
        shown.add_row(
            row.part, f"{row.unique_tokens:,}", f"{row.path_tokens:,}", f"{row.tree.seconds:.1f}",
            f"{row.flat.seconds:.1f}", f"{row.of_flat:.3f}", f"{row.of_ideal:.2f}", f"{row.cpu_of_ideal:.2f}",
            f"{row.pairs_of_ideal:.2f}",
        )  # fmt: skip
    shown.caption = "ideal: flat seconds x unique / path tokens"
    return shown


def _sizes(rows: list[Against]) -> Table:
    shown = Table("part", "tree MB", "flat MB", "tree tokens/s", "flat tokens/s", "gradient off by")
    for row in rows:
        shown.add_row(
            row.part, f"{row.tree.peak_mb:.1f}", f"{row.flat.peak_mb:.1f}", f"{row.tree.path_tokens_per_s:,.0f}",
            f"{row.flat.path_tokens_per_s:,.0f}", f"{row.gradient.relative:.1e}",
        )  # fmt: skip
    shown.caption = "MB above the weights; tokens of paths"
    return shown


def _chain(found: Chain) -> Table:
    shown = Table("tokens", "s", "tokens/s", "peak MB", "of it K/V and gradients")
    for row in found.rows:
        shown.add_row(
            f"{row.tokens:,}", f"{row.tree.seconds:.1f}", f"{row.tree.unique_tokens_per_s:,.0f}",
            f"{row.tree.peak_mb:.1f}", f"{row.state_mb:.1f}",
        )  # fmt: skip
    shown.caption = (
        f"a further token takes {found.growth_bytes:,.0f} bytes: {found.state_bytes:,} for keys, values and their "
        f"gradients, {found.beyond_bytes:,.0f} beyond"
    )
    return shown


def _group(found: Group) -> Table:
    shown = Table("members", "tree MB", "detached MB", "tree s", "detached s", "detached off by", "cosine")
    for row in found.rows:
        shown.add_row(
            f"{row.members}", f"{row.tree.peak_mb:.1f}", f"{row.detached.peak_mb:.1f}", f"{row.tree.seconds:.1f}",
            f"{row.detached.seconds:.1f}", f"{row.gradient.relative:.1%}", f"{row.gradient.cosine:.4f}",
        )  # fmt: skip
    shown.caption = (
        f"a prompt of {found.prompt:,} tokens, members of {found.branch:,}; a further member takes "
        f"{found.tree_member_mb:.2f} MB, with a detached prompt {found.detached_member_mb:.2f} MB"
    )
    return shown


def _precision(found: Precision) -> Table:
    shown = Table("gradient", "beside", "off by", "cosine")

    def add(name: str, beside: str, apart: Apart) -> None:
        shown.add_row(name, beside, f"{apart.relative:.1e}", f"{apart.cosine:.6f}")

    add("tree, float32", "flat, float32", found.float32_tree)
    add("tree, bfloat16", "flat, float32", found.bfloat16_tree)
    add("flat, bfloat16", "flat, float32", found.bfloat16_flat)
    add("tree, bfloat16", "flat, bfloat16", found.bfloat16_tree_flat)
    return shown
