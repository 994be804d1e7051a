"""A small policy that was never trained, for benches that need a model directory and no wisdom."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TEXT = "read the file, say what it holds, and go on with the next one until all of them have been looked at"
VOCABULARY = 400


def write_policy(directory: Path, context: int) -> "dict[str, Tensor]":
    """Write a Llama of `context` positions and its tokenizer to `directory`, which must not exist; its tensors by name.

    Blocking; imports torch.
    """
    from opengyre.tiny.checkpoint import save_pretrained
    from opengyre.tiny.config import TinyConfig
    from opengyre.tiny.model import TinyModel
    from opengyre.tiny.tokenizer import TinyTokenizer

    directory.mkdir()
    tokenizer = TinyTokenizer.train([TEXT], VOCABULARY)
    tokenizer.save(directory)
    config = TinyConfig(
        tokenizer.vocab_size, max_position_embeddings=context, bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.end_id,
    )  # fmt: skip
    model = TinyModel(config, 0)
    save_pretrained(model, directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
