"""What one measurement of the trainer is told and what it finds: plain data, no torch."""

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama with random weights."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    mlp: int

    def text(self) -> str:
        return (
            f"Llama: hidden {self.hidden}, {self.layers} layers, {self.heads} x {self.head_dim} heads, MLP {self.mlp}"
        )

    def state_bytes(self, width: int) -> int:
        """Of a token: keys and values, of `width` bytes a number, and their gradients in float32."""
        return 2 * self.layers * self.heads * self.head_dim * (width + 4)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`way` is `tree`, `flat` (each path in full, gradient checkpointing on) or `detached` (the first segment of the
    forest without a gradient). The shape's numbers are those of `bench_trainer_shapes.Shape`. `gradient`: file that the
    gradient is written to."""

    way: str
    shape: dict[str, str | int]
    model: Model
    chunk: int
    device: str
    dtype: str
    threads: int
    gradient: str | None = None
    say: str = ""
    """What progress lines begin with."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`peak_bytes`: above the weights. `forward_tokens` of the tree and of the detached way counts each pass."""

    way: str
    unique_tokens: int
    path_tokens: int
    unique_pairs: int
    """Of a token and one that it attends to."""
    path_pairs: int
    longest: int
    events: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    loss: float
    forward_tokens: int
    parameters: int
    device: str
    """Its name."""
