"""Gradients as `safetensors` itself makes bytes of them, and what learners write."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from opengyre.host.learners import Accumulator, Learner
from opengyre.shared.blobs import reference


def flatten(gradients: Mapping[str, Tensor]) -> bytes:
    return save({name: gradients[name].detach().float().contiguous() for name in sorted(gradients)})


async def written(learner: Learner, held: Accumulator) -> bytes:
    """What the learner writes of it, after a look at what it says about that."""
    with tempfile.NamedTemporaryFile() as file:
        said = await learner.write(held, Path(file.name))
        content = file.read()
    assert (said.reference, said.size) == (reference(content), len(content))
    return content
