"""A cell of two ranks with FSDP2 makes the update that one process makes."""

import pytest
import torch

from opengyre.ranks.crew import crew
from opengyre.ranks.sharded import Sharded, UnshardableError, layers_of
from opengyre.ranks.sharing import share
from support.ranks_models import moved, objective_of, paths_of, stepped, update
from support.treegrad import error, flat_gradient, make

pytestmark = pytest.mark.torch

CASES = [
    ("llama", "resident", "clip"),
    ("llama", "lockstep", "clip"),
    ("llama", "kept", "sequence"),
    ("qwen3", "resident", "sequence"),
    ("qwen3_next", "resident", "clip"),
    ("qwen3_next", "lockstep", "truncated"),
    ("tiny", "resident", "clip"),
    ("tiny", "lockstep", "clip"),
]


async def test_two_ranks_make_the_update_of_one_process() -> None:
    async with crew(2, start_s=120) as found:
        for number, (family, way, loss) in enumerate(CASES):
            paths = paths_of(number)
            mine = share([len(path.sequence.tokens) for path in paths], 2)
            if number % 2:  # The second rank has nothing, and is in every collective.
                mine = [tuple(range(len(paths))), ()]
            results = await found.burst(update, [(family, way, number, loss, part) for part in mine], timeout_s=120)
            model = make(family, dtype=torch.float32)
            _, _, gradient = flat_gradient(model, paths, objective_of(loss))
            stepped(model, gradient)
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            before = {
                name: parameter.detach() for name, parameter in make(family, dtype=torch.float32).named_parameters()
            }
            assert error(before, weights) > 1e-3, "the step is far above what is compared"
            for got, after, (local, whole) in results:
                assert error(got, gradient) < 1e-6, (family, way)
                assert error(after, weights) < 1e-6, (family, way)
                assert local < 0.6 * whole
        assert await found.burst(moved, ["llama", "llama"], timeout_s=60) == [True, True]


def test_a_model_without_layers_is_refused_by_its_name() -> None:
    with pytest.raises(UnshardableError, match=r"a Linear; allowed are those with layers in model\.layers"):
        layers_of(torch.nn.Linear(1, 1))
    assert Sharded.__doc__
