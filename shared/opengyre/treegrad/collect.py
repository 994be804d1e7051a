"""Parameter gradients on their way from a backward pass to an accumulator."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from opengyre.treegrad.drivers.base import Driver
from opengyre.treegrad.kernels import wide


@contextmanager
def collecting(driver: Driver, accumulator: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, whatever a backward pass leaves in a parameter's `.grad` is added to `accumulator` (by name) at once and
    let go, so that no second copy of all gradients exists and a 16-bit model's sums are of the accumulator's type. The
    `.grad` fields are afterwards what they were before. Raises `ValueError` for a parameter without a place."""
    named = [(name, parameter) for name, parameter in driver.named_parameters() if parameter.requires_grad]
    for name, _ in named:
        if name not in accumulator:
            raise ValueError(f"the accumulator has no {name}; each trained parameter needs a place")
    before = [parameter.grad for _, parameter in named]
    hooks = []
    try:
        for name, parameter in named:
            parameter.grad = None
            hooks.append(parameter.register_post_accumulate_grad_hook(_adder(accumulator[name])))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for (_, parameter), grad in zip(named, before, strict=True):
            parameter.grad = grad


def _adder(place: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        place.add_(parameter.grad)
        parameter.grad = None

    return add


def empty_accumulator(driver: Driver) -> dict[str, Tensor]:
    """Zeros in float32 (float64 for float64 parameters), by parameter name."""
    return {
        name: parameter.new_zeros(parameter.shape, dtype=wide(parameter.dtype))
        for name, parameter in driver.named_parameters()
        if parameter.requires_grad
    }
