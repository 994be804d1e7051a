"""Three ways to the gradient of the same sequences: the tree's, each path in full, and with a detached prompt.

All three take log-probs and the output embedding's gradient from `treegrad.head`, a few rows at a time, and the same
objective, whose weights are absolute: what they differ in is what they are named for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from opengyre.cli.bench_trainer_job import Model
from opengyre.cli.bench_trainer_shapes import VOCABULARY
from opengyre.learn.objective import objective
from opengyre.proto.run import Optimization
from opengyre.treegrad import head
from opengyre.treegrad.collect import collecting
from opengyre.treegrad.drivers import Driver, driver_for
from opengyre.treegrad.drivers.base import Pass
from opengyre.treegrad.drivers.hf import HfDriver
from opengyre.treegrad.forest import Forest, Path, build
from opengyre.treegrad.kernels import wide
from opengyre.treegrad.store import KeyValues
from opengyre.treegrad.table import event_tensors
from opengyre.treegrad.walk import accumulate, evaluate

SPREAD = 1.2
"""Standard deviation of queries and keys, by the weights' initialization: of attention that chooses."""
GAP_S = 5.0
"""Between progress lines."""
LOSS = objective(Optimization(loss="truncated"))
"""Continuous in the log-probs, so that rounding moves no token over an edge."""
Gradient = dict[str, Tensor]


def model(given: Model, positions: int, device: str, dtype: torch.dtype) -> Any:
    """The same weights every time, but for rounding to `dtype`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=given.hidden, intermediate_size=given.mlp, num_hidden_layers=given.layers,
        num_attention_heads=given.heads, num_key_value_heads=given.heads, head_dim=given.head_dim,
        max_position_embeddings=positions, pad_token_id=None, initializer_range=SPREAD / given.hidden**0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    net: Any = LlamaForCausalLM(config)
    return net.to(device=device, dtype=dtype).eval()


def tree(net: Any, paths: Sequence[Path], into: Mapping[str, Tensor], chunk: int, _say: object) -> tuple[float, int]:
    """Loss, and tokens that went forward."""
    found = accumulate(driver_for(net), build(paths), LOSS, into, chunk=chunk)
    return found.loss, found.stats.forward_tokens


def flat(
    net: Any, paths: Sequence[Path], into: Mapping[str, Tensor], _chunk: int, say: Callable[[str], None]
) -> tuple[float, int]:
    """Each path in full, one after the other; each layer is computed again for its backward pass."""
    driver, loss, said = HfDriver(net), 0.0, time.monotonic()
    net.train()
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        with collecting(driver, into):
            for number, path in enumerate(paths):
                if time.monotonic() - said > GAP_S:
                    said = time.monotonic()
                    say(f"{number} of {len(paths)} paths")
                loss += _full(net, driver, path)
    finally:
        net.gradient_checkpointing_disable()
        net.eval()
    return loss, 2 * sum(len(path.sequence.tokens) for path in paths)


def _full(net: Any, driver: Driver, path: Path) -> float:
    alone = build([path])
    tokens = torch.as_tensor(alone.tokens, device=net.device)
    hidden = net.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    rows = torch.as_tensor(alone.events.node - 1, device=tokens.device)
    states, targets = hidden.detach()[rows], tokens[rows + 1]
    temperature = torch.as_tensor(alone.events.temperature, dtype=wide(net.dtype), device=tokens.device)
    logp, _ = head.log_probs(driver, states, targets, temperature)
    loss, _, g = evaluate(LOSS, logp, event_tensors(alone, logp.device, logp.dtype))
    down = head.backpropagate(driver, states, targets, temperature, g)
    hidden.backward(torch.zeros_like(hidden).index_copy_(0, rows, down))
    return loss


class _Deaf(KeyValues):
    """Keys and values to which no gradient is added."""

    def add(self, layer: int, low: int, high: int, keys: Tensor, values: Tensor) -> None:
        del layer, low, high, keys, values


def _pass(store: KeyValues, position: int, tokens: Tensor, *, keep: bool = False, graph: bool) -> Pass:
    positions = torch.arange(position, position + len(tokens), device=tokens.device)
    return Pass(store, position, positions, {}, keep=keep, graph=graph)


def detached(
    net: Any, paths: Sequence[Path], into: Mapping[str, Tensor], chunk: int, _say: object
) -> tuple[float, int]:
    """As LongStraw does: what the sequences begin with is computed without a graph, and only what they end with, one
    after the other, with one. Raises `ValueError` where the forest is not a prompt with branches that are trained."""
    driver, forest = driver_for(net), build(paths)
    if not all(above == 0 for above in forest.parent[1:]) or int(forest.events.node.min()) < forest.first[1]:
        raise ValueError("a detached prompt needs sequences that part once, with nothing trained before that")
    tokens = torch.as_tensor(forest.tokens, device=net.device)
    store, last, forward = _Deaf(int(forest.first[1])), tokens.new_zeros(0), forest.nodes
    prompt = tokens[: forest.first[1]]
    with torch.no_grad():
        for low in range(0, len(prompt), chunk):
            part = prompt[low : low + chunk]
            last = driver.hidden(part, _pass(store, low, part, keep=True, graph=False))[-1].clone()
        branches = [_Branch(driver, forest, tokens, segment, last) for segment in range(1, forest.segments)]
        logp = torch.cat([branch.log_probs(store) for branch in branches])
    order = torch.as_tensor(forest.events.node, device=tokens.device).argsort()
    events = event_tensors(forest, logp.device, logp.dtype)
    in_order = torch.empty_like(logp)
    in_order[order] = logp
    loss, _, g = evaluate(LOSS, in_order, events)
    with collecting(driver, into):
        for branch, part in zip(branches, g[order].split([branch.count for branch in branches]), strict=True):
            branch.backward(store, part)
            forward += branch.count
    return loss, forward


class _Branch:
    """One branch of which each token is trained once, at temperature 1."""

    def __init__(self, driver: Driver, forest: Forest, tokens: Tensor, segment: int, last: Tensor) -> None:
        low, high = int(forest.first[segment]), int(forest.first[segment + 1])
        self._driver, self._last, self._tokens = driver, last, tokens[low:high]
        self._position, self.count = int(forest.depth[segment]), high - low
        self._temperature = torch.ones(self.count, dtype=wide(last.dtype), device=last.device)

    def log_probs(self, store: KeyValues) -> Tensor:
        hidden = self._driver.hidden(self._tokens, _pass(store, self._position, self._tokens, graph=False))
        return head.log_probs(self._driver, self._states(hidden), self._tokens, self._temperature)[0]

    def backward(self, store: KeyValues, g: Tensor) -> None:
        hidden = self._driver.hidden(self._tokens, _pass(store, self._position, self._tokens, graph=True))
        down = head.backpropagate(self._driver, self._states(hidden.detach()), self._tokens, self._temperature, g)
        hidden.backward(torch.cat((down[1:], torch.zeros_like(down[:1]))))

    def _states(self, hidden: Tensor) -> Tensor:
        return torch.cat((self._last[None], hidden[:-1]))


WAYS = {"tree": tree, "flat": flat, "detached": detached}
