"""Bytes that each role holds. Pure.

A serving replica: weights in the type that it serves in, and keys and values of what is left (`opengyre.host.vllm_plan`
works out how much, as it does when vLLM is started). A training cell (docs/trainer.md): parameters and the sum of
gradients in float32, keys, values and their gradients along the longest path, and one chunk's graph. The trainer's
process: parameters, the optimizer's moments, and the sum of contributions.
"""

from dataclasses import dataclass
from typing import Final, Literal

from opengyre.sizing.shape import Shape

FLOAT32: Final = 4
SUM: Final = 8
"""Contributions are added up in float64."""
LOGITS: Final = 3 * FLOAT32 * (1 << 24)
"""Logits exist for 16 M numbers at a time; beside them their log-softmax and its gradient."""


@dataclass(frozen=True, slots=True)
class Train:
    """Of one process of a training cell, bytes."""

    weights: int
    gradients: int
    path: int
    """Keys, values and their gradients along the longest path."""
    chunk: int
    """One chunk's graph, and logits."""
    offloaded: bool
    """`path` lies in main memory."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.chunk + (0 if self.offloaded else self.path)


def activations(shape: Shape) -> int:
    """Numbers that the graph of one token keeps, all layers together.

    Of a layer: its input, what the two norms and the residual sums give (6 hidden), queries before and after norm and
    rotation and what attention gives (4), keys and values likewise (4), and of the MLP gate, its activation, up and
    their product (4). For Qwen3 within a fifth of what autograd saves; Llama, without norms of queries and keys, keeps
    up to a third less (`tests/unit/test_sizing.py`).
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.layers * (6 * shape.hidden + 4 * queries + 4 * keys + 4 * shape.intermediate)


def train_cell(shape: Shape, *, path_tokens: int, chunk: int, ranks: int, offload: bool) -> Train:
    """`ranks` processes share parameters and gradients (FSDP2) and each walks paths of its own; a layer's whole weights
    are there while it computes."""
    layer = (shape.parameters // shape.layers) * FLOAT32 if ranks > 1 else 0
    tokens = min(chunk, path_tokens)
    return Train(
        weights=-(-shape.parameters * FLOAT32 // ranks) + layer,
        gradients=-(-shape.parameters * FLOAT32 // ranks),
        path=path_tokens * shape.kv_values * (FLOAT32 + FLOAT32),
        chunk=tokens * activations(shape) * FLOAT32 + min(LOGITS, 3 * FLOAT32 * tokens * shape.vocabulary),
        offloaded=offload,
    )


def longest_path(shape: Shape, memory_bytes: int, *, chunk: int, ranks: int, offload: bool) -> int:
    """Tokens of the longest path that a training cell's process has memory for; 0 where it has none for the weights."""
    low, high = 0, shape.context
    while low < high:
        tokens = (low + high + 1) // 2
        fits = train_cell(shape, path_tokens=tokens, chunk=chunk, ranks=ranks, offload=offload).total <= memory_bytes
        low, high = (tokens, high) if fits else (low, tokens - 1)
    return low


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer's process, bytes of main memory."""

    weights: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients


def trainer(shape: Shape, optimizer: Literal["adamw", "adafactor"]) -> Trainer:
    """AdamW keeps two numbers a parameter; Adafactor a row and a column a matrix, which is next to nothing."""
    moments = 2 * shape.parameters * FLOAT32 if optimizer == "adamw" else shape.layers * shape.hidden * 32
    return Trainer(shape.parameters * FLOAT32, moments, shape.parameters * SUM)


def kv_token_bytes(shape: Shape, width: int, ranks: int) -> int:
    """Bytes of one token's keys and values on one of `ranks` cards; more cards than heads of keys hold them twice."""
    return 2 * shape.layers * shape.head_dim * width * -(-shape.kv_heads // ranks)
