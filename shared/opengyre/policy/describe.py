"""What a model directory is, from its files alone: no model is built, no tensor read. Needs no torch.

Raises `ModelDirectoryError` for a directory that cannot be the policy of a run: what `check_directory` refuses, weights
that are not what the config says, a chat template that cannot be parsed, and a model that cannot be trained exactly.
"""

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opengyre.policy.directory import (
    TOKENIZER_FILE,
    check_directory,
    header,
    highest_token,
    read_config,
    read_json,
    tiny_config,
    weight_files,
)
from opengyre.policy.fields import check_family, check_shapes
from opengyre.policy.templates import check_template, has_template
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError

NAMES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Number formats of safetensors -> torch's names of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    directory: str
    architecture: str
    model_type: str
    tiny: bool
    """Whether our own decoder computes it."""
    parameters: int
    """Numbers in the files; a tied output embedding that is stored as well counts once."""
    dtypes: tuple[str, ...]
    bytes: int
    """Of the weight files."""
    vocabulary: int | None
    """None: the family's own, which the config does not say."""
    tokens: int
    """Ids that the tokenizer has."""
    context: int | None
    """Tokens of a sequence at most; None: the family's own."""
    tied: bool
    """Whether input and output embedding are one."""
    chat_template: bool
    """Without one the model takes text prompts only (`harness.prompt = "transcript"`)."""


def _check_known(directory: Path, kind: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        return  # Who opens the model says what to install.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise ModelDirectoryError(
            f"{directory / CONFIG_FILE}: model_type is {kind!r}, which transformers does not know"
        )


def _rows(shapes: dict[str, tuple[str, tuple[int, ...]]], ending: str) -> int | None:
    """Rows of the matrix whose name ends so."""
    return next((shape[0] for name, (_, shape) in shapes.items() if name.endswith(ending) and len(shape) == 2), None)


def describe(directory: Path) -> ModelFacts:
    """What the model in `directory` is; raises `ModelDirectoryError` where it can be no policy."""
    check_directory(directory)
    fields = read_config(directory)
    kind, source = fields["model_type"], str(directory / CONFIG_FILE)
    check_family(fields, source)
    _check_known(directory, kind)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(directory):
        shapes.update(header(path))
    check_shapes(fields, shapes, source)
    check_template(directory)
    tied = bool(fields.get("tie_word_embeddings", _rows(shapes, "lm_head.weight") is None))
    names = {name for name in shapes if not (tied and name.endswith("lm_head.weight"))}
    context = fields.get("max_position_embeddings")
    architectures = fields.get("architectures")
    return ModelFacts(
        directory=str(directory),
        architecture=architectures[0] if isinstance(architectures, list) and architectures else kind,
        model_type=kind,
        tiny=tiny_config(fields) is not None,
        parameters=sum(math.prod(shapes[name][1]) for name in names),
        dtypes=tuple(sorted({NAMES.get(form, form) for form, _ in shapes.values()})),
        bytes=sum(path.stat().st_size for path in weight_files(directory)),
        vocabulary=fields.get("vocab_size"),
        tokens=highest_token(read_json(directory / TOKENIZER_FILE)) + 1,
        context=context if isinstance(context, int) else None,
        tied=tied,
        chat_template=has_template(directory),
    )


def found_below(root: Path) -> list[Path]:
    """Model directories at `root` or one or two folders below it, sorted."""
    places = [root, *root.glob("*"), *root.glob("*/*")] if root.is_dir() else []
    return sorted(path for path in places if (path / CONFIG_FILE).is_file() and _is_model(path))


def _is_model(path: Path) -> bool:
    try:
        content: Any = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("model_type"), str)
