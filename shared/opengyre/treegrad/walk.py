"""The exact gradient of a forest: log-probs, the loss on the table of events, then chunks in reverse order.

`dF/dtheta = sum_n g_n * dlogp_n/dtheta` with `g = dF/dlogp`, for every loss F that is a function of log-probs. So the
first pass computes all log-probs without a graph, the objective gives g by autograd on that vector alone, and the
second pass back-propagates one scalar through the forest.

Order: units (segments, and packs of small subtrees) are in preorder, so walking them backwards takes children before
their parent, and a unit's chunks
are taken backwards too. Then all later tokens of all descendants have added to the gradient of a chunk's keys, values
and last hidden state before the chunk itself is back-propagated. Nothing recurses.

State: the store holds one path. The first pass leaves the last path there, which is where the second one starts; a
unit off that path is computed once more, without a graph, when the walk first comes below it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opengyre.learn.events import Events
from opengyre.treegrad import head
from opengyre.treegrad.collect import collecting
from opengyre.treegrad.drivers.base import Driver, Pass, placement
from opengyre.treegrad.forest import ROOT, Forest
from opengyre.treegrad.kernels import wide
from opengyre.treegrad.plan import Chunk, plan
from opengyre.treegrad.store import Boundary, KeyValues, Recurrent
from opengyre.treegrad.table import event_tensors, outputs

Objective = Callable[[Tensor, Events], tuple[Tensor, object]]
"""`(log-probs [events], table) -> (loss, what it wants to report)`."""

CHUNK = 2048
PACK = 512
BLOCK = 8192


@dataclass(slots=True)
class WalkStats:
    """What was computed."""

    unique_tokens: int = 0
    path_tokens: int = 0
    events: int = 0
    forward_tokens: int = 0
    """Tokens that went forward, in any pass; the backward passes are of `backward_tokens`."""
    backward_tokens: int = 0
    chunks: int = 0
    """Backward passes."""


@dataclass(frozen=True, slots=True)
class Result:
    """`loss` and `report` are the objective's; `logp` and `entropy` are `[events]`."""

    loss: float
    report: object
    logp: Tensor
    entropy: Tensor | None
    stats: WalkStats


@dataclass(slots=True)
class _Held:
    """A unit whose keys and values are in the store: the state before each of its chunks, and after the last."""

    unit: int
    before: list[Boundary]
    end: Boundary


@dataclass(slots=True)
class _Below:
    """The gradient that a unit's descendants left at its end."""

    hidden: Tensor | None = None
    recurrent: dict[int, Recurrent] = field(default_factory=dict)


class Walk:
    """One forest on one model's weights, which must not change meanwhile: `log_probs`, then `backward`, once each.

    `chunk`: tokens computed at once; `pack`: tokens up to which neighbouring small subtrees are computed together,
    under a mask, where the model allows it; `cuts`: nodes where a chunk begins besides (then nothing is packed);
    `block`: keys attended to at once; `offload`: keys, values and their gradients in host memory.
    """

    def __init__(
        self,
        driver: Driver,
        forest: Forest,
        *,
        chunk: int = CHUNK,
        pack: int = PACK,
        cuts: Collection[int] = (),
        offload: bool = False,
        block: int = BLOCK,
    ) -> None:
        self._driver, self._forest = driver, forest
        if forest.nodes and (int(forest.tokens.max()) >= driver.vocab_size or int(forest.tokens.min()) < 0):
            raise ValueError(
                f"tokens are {int(forest.tokens.min())} to {int(forest.tokens.max())}; the model's vocabulary allows "
                f"0 to {driver.vocab_size - 1}"
            )
        self._device, self._dtype = placement(driver.model)
        self._units = plan(forest, chunk, pack if driver.packs else 0, cuts)
        self._tokens = torch.as_tensor(forest.tokens, device=self._device)
        self._outputs = outputs(forest, self._device, wide(self._dtype))
        self._store = KeyValues(forest.longest(), offload=offload, block=block)
        self._stack: list[_Held] = []
        self.stats = WalkStats(forest.nodes, forest.path_tokens(), len(forest.events))

    def log_probs(self, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-prob of each event's token, `[events]`, and the entropy there."""
        found = self._outputs.temperature.new_zeros(len(self._outputs))
        spread = torch.zeros_like(found) if entropy else None
        for number, unit in enumerate(self._units):
            while self._stack and self._stack[-1].unit != unit.parent:
                self._stack.pop()
            self._enter(number, len(unit.chunks), found, spread)
        of_event = self._outputs.of_event
        return found[of_event], None if spread is None else spread[of_event]

    def backward(self, g: Tensor, accumulator: Mapping[str, Tensor]) -> None:
        """Add `sum_e g_e * dlogp_e/dparameter` to `accumulator`; `g` is `[events]`. Also right without `log_probs`."""
        total = self._outputs.temperature.new_zeros(len(self._outputs))
        total.index_add_(0, self._outputs.of_event, g.to(total))
        needed = self._needed(total)
        below: dict[int, _Below] = {}
        with collecting(self._driver, accumulator):
            for number in reversed(range(len(self._units))):
                if needed[number]:
                    self._back(number, needed[number], total, below)

    def _needed(self, g: Tensor) -> list[int]:
        """Chunks of each unit, from its begin, with a g or a child's g in or after them."""
        used = g.cpu().numpy() != 0
        last = [0] * len(self._units)
        for number, unit in reversed(list(enumerate(self._units))):
            if not last[number]:
                live = [used[self._outputs.within(chunk.low, chunk.high)].any() for chunk in unit.chunks]
                last[number] = max((count for count, any_ in enumerate(live, 1) if any_), default=0)
            if last[number] and unit.parent != ROOT:
                last[unit.parent] = len(self._units[unit.parent].chunks)
        return last

    def _enter(self, number: int, chunks: int, logp: Tensor | None = None, spread: Tensor | None = None) -> None:
        """Compute a unit's first `chunks` chunks without a graph, its parent being the last on the stack."""
        state = self._stack[-1].end if self._stack else Boundary()
        held = _Held(number, [], state)
        for chunk in self._units[number].chunks[:chunks]:
            held.before.append(held.end)
            run = self._pass(chunk, held.end.recurrent, graph=False)
            with torch.no_grad():
                hidden = self._driver.hidden(self._tokens[chunk.low : chunk.high], run)
            if logp is not None:
                self._read(chunk, held.end.hidden, hidden, logp, spread)
            held.end = Boundary(hidden[-1].clone(), run.after)
            self.stats.forward_tokens += chunk.tokens
        self._stack.append(held)

    def _pass(self, chunk: Chunk, before: dict[int, Recurrent], *, graph: bool) -> Pass:
        if chunk.pack is None:
            positions, mask = torch.arange(chunk.position, chunk.position + chunk.tokens, device=self._device), None
        else:
            positions = torch.as_tensor(chunk.pack.positions, device=self._device)
            sees = torch.as_tensor(chunk.pack.sees(), device=self._device)
            mask = torch.zeros(sees.shape, dtype=self._dtype, device=self._device).masked_fill_(~sees, -math.inf)
        keep = not graph and chunk.pack is None
        return Pass(self._store, chunk.position, positions, before, mask=mask, keep=keep, graph=graph)

    def _rows(self, chunk: Chunk, before: Tensor | None, hidden: Tensor) -> tuple[Tensor, slice, Tensor, Tensor]:
        """The hidden states that predict a chunk's outputs; which outputs they are; the outputs' tokens; and the rows
        of those states, where row 0 lies before the chunk and row r is that of its r-th token, counted from 1."""
        part = self._outputs.within(chunk.low, chunk.high)
        inside = self._outputs.node[part] - chunk.low
        rows = torch.as_tensor(inside if chunk.pack is None else chunk.pack.previous[inside], device=self._device)
        first = hidden[:1] if before is None else before[None]
        targets = self._tokens[chunk.low : chunk.high][torch.as_tensor(inside, device=self._device)]
        return torch.cat((first, hidden))[rows], part, targets, rows

    def _read(self, chunk: Chunk, before: Tensor | None, hidden: Tensor, logp: Tensor, spread: Tensor | None) -> None:
        states, part, targets, _ = self._rows(chunk, before, hidden)
        temperature = self._outputs.temperature[part]
        logp[part], found = head.log_probs(self._driver, states, targets, temperature, entropy=spread is not None)
        if spread is not None and found is not None:
            spread[part] = found

    def _hold(self, number: int, chunks: int) -> _Held:
        """Have a unit and all before it in the store; of a unit with nothing below, all but the last of the `chunks`
        that are needed."""
        path: list[int] = []
        above = number
        while above != ROOT:
            path.append(above)
            above = self._units[above].parent
        path.reverse()
        same = 0
        while same < min(len(path), len(self._stack)) and self._stack[same].unit == path[same]:
            same += 1
        del self._stack[same:]
        for above in path[same:-1]:
            self._enter(above, len(self._units[above].chunks))
        if len(self._stack) < len(path):
            self._enter(number, chunks - 1)
        return self._stack[-1]

    def _back(self, number: int, chunks: int, g: Tensor, below: dict[int, _Below]) -> None:
        held, unit = self._hold(number, chunks), self._units[number]
        gradient = below.pop(number, _Below())
        before = [*held.before, held.end][:chunks]
        for chunk, state in zip(reversed(unit.chunks[:chunks]), reversed(before), strict=True):
            self._back_chunk(chunk, state, g, gradient)
        if not unit.packed:
            self._store.clear(unit.chunks[0].position, unit.chunks[-1].position + unit.chunks[-1].tokens)
        if unit.parent != ROOT:
            _add(below.setdefault(unit.parent, _Below()), gradient)

    def _back_chunk(self, chunk: Chunk, state: Boundary, g: Tensor, below: _Below) -> None:
        """Recompute a chunk with a graph and back-propagate it; `below` is the gradient at its end on entry, and at
        its begin afterwards."""
        leaves = {
            layer: Recurrent(r.state.detach().requires_grad_(), r.tail.detach().requires_grad_())
            for layer, r in state.recurrent.items()
        }
        run = self._pass(chunk, leaves, graph=True)
        with torch.enable_grad():
            hidden = self._driver.hidden(self._tokens[chunk.low : chunk.high], run)
        states, part, targets, rows = self._rows(chunk, state.hidden, hidden.detach())
        down = head.backpropagate(self._driver, states, targets, self._outputs.temperature[part], g[part])
        at = torch.zeros(chunk.tokens + 1, hidden.shape[1], dtype=wide(self._dtype), device=self._device)
        at.index_add_(0, rows, down.to(at))
        if below.hidden is not None:
            at[-1] += below.hidden
        roots: list[Tensor] = [hidden]
        grads: list[Tensor] = [at[1:].to(hidden)]
        for layer, (keys, values) in run.own.items() if chunk.pack is None else ():
            found = self._store.gradients(layer, chunk.position, chunk.position + chunk.tokens, keys)
            if found is not None:
                roots.extend((keys, values))
                grads.extend(found)
        for layer, after in below.recurrent.items():
            roots.extend((run.after[layer].state, run.after[layer].tail))
            grads.extend((after.state, after.tail))
        live = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root.requires_grad]
        torch.autograd.backward([root for root, _ in live], [grad for _, grad in live])
        below.hidden = at[0]
        below.recurrent = {layer: Recurrent(_grad(leaf.state), _grad(leaf.tail)) for layer, leaf in leaves.items()}
        self.stats.backward_tokens += chunk.tokens
        self.stats.forward_tokens += chunk.tokens
        self.stats.chunks += 1


def _grad(leaf: Tensor) -> Tensor:
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)


def _add(into: _Below, part: _Below) -> None:
    """Sums of what several children leave."""
    if part.hidden is not None:
        into.hidden = part.hidden if into.hidden is None else into.hidden + part.hidden
    for layer, found in part.recurrent.items():
        mine = into.recurrent.get(layer)
        into.recurrent[layer] = found if mine is None else Recurrent(mine.state + found.state, mine.tail + found.tail)


def accumulate(
    driver: Driver,
    forest: Forest,
    objective: Objective,
    accumulator: Mapping[str, Tensor],
    *,
    chunk: int = CHUNK,
    pack: int = PACK,
    cuts: Collection[int] = (),
    offload: bool = False,
    block: int = BLOCK,
    entropy: bool = False,
    base_version: int | None = None,
    reference: Tensor | None = None,
) -> Result:
    """Add the gradient of `objective` on the forest's events, at the model's weights, to `accumulator` (parameter name
    -> tensor). The model's `.grad` fields are left alone. `base_version` is the version of those weights; `reference`
    holds another policy's log-probs `[events]`. Nothing is added before the loss is there."""
    walk = Walk(driver, forest, chunk=chunk, pack=pack, cuts=cuts, offload=offload, block=block)
    logp, spread = walk.log_probs(entropy=entropy)
    loss, report, g = evaluate(
        objective, logp, event_tensors(forest, logp.device, logp.dtype, base_version=base_version, reference=reference)
    )
    walk.backward(g, accumulator)
    return Result(loss, report, logp, spread, walk.stats)


def evaluate(objective: Objective, logp: Tensor, events: Events) -> tuple[float, object, Tensor]:
    """The loss phase: the loss, the objective's report, and `g = dloss/dlogp` (`[events]`)."""
    leaf = logp.detach().requires_grad_()
    with torch.enable_grad():
        loss, report = objective(leaf, events)
        (g,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), report, g
