"""What a model directory must hold, checked before anything is built from it. Needs no torch.

Invariant: whatever cannot be used is refused by a `ModelDirectoryError` that names the file or the field.
"""

import json
from pathlib import Path
from typing import Any, Final

from opengyre.policy.fields import check_fields
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError, TinyConfig

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
TOKENIZER_FILE: Final = "tokenizer.json"
EXTRA: Final = "install it with: pip install 'opengyre[models]'"
DEFAULTS: Final[dict[str, Any]] = {"rope_scaling": None, "attention_dropout": 0.0}
"""Fields that the tiny decoder does not read, and the values with which it computes the same as the model that the
config describes."""

MAX_HEADER: Final = 100_000_000
"""Bytes of a safetensors header at most, by the format; in another file its length may be any number."""
UNUSABLE: Final = {
    "quantization_config": "quantized weights cannot be trained; allowed are weights of float16, bfloat16 or float32",
    "auto_map": "code that comes with a model is not run; allowed are the families that transformers has",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`; raises `ModelDirectoryError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelDirectoryError(f"{path} does not exist; a model directory has a {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path} holds a {type(content).__name__}; allowed is a JSON object")
    return content


def read_config(directory: Path) -> dict[str, Any]:
    """The content of `config.json`, with the fields that every causal model needs; raises `ModelDirectoryError`."""
    if not directory.is_dir():
        raise ModelDirectoryError(f"{directory} is no directory; a model is a directory with a {CONFIG_FILE}")
    fields = read_json(directory / CONFIG_FILE)
    if not isinstance(fields.get("model_type"), str):
        raise ModelDirectoryError(f"{directory / CONFIG_FILE}: model_type is missing; it names the model's family")
    for name, reason in UNUSABLE.items():
        if fields.get(name) is not None:
            raise ModelDirectoryError(f"{directory / CONFIG_FILE}: {name} is set; {reason}")
    return fields


def tiny_config(fields: dict[str, Any]) -> TinyConfig | None:
    """The shape of a model that the tiny decoder computes exactly; None for any other."""
    try:
        config = TinyConfig.from_hf(fields)
    except ModelDirectoryError:
        return None
    plain = all(fields.get(name, default) == default for name, default in DEFAULTS.items())
    return config if plain and fields.get("head_dim", config.head_dim) == config.head_dim else None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the weights, sorted; raises `ModelDirectoryError` naming one that is missing."""
    index = directory / INDEX_FILE
    names = [WEIGHTS_FILE]
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise ModelDirectoryError(f"{index}: weight_map is missing; it says which file holds each tensor")
        names = sorted(set(places.values()))
    for name in names:
        if not (directory / name).is_file():
            source = f"{INDEX_FILE} names it" if index.exists() else "weights are read from safetensors files"
            raise ModelDirectoryError(f"{directory / name} does not exist; {source}")
    return [directory / name for name in names]


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> number format and shape of each tensor of a safetensors file, as its header says; raises
    `ModelDirectoryError` for a file that is not whole. The tensors are not read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(min(length, MAX_HEADER)))
        places = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        found = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in places.items()}
        end = 8 + length + max((stop for _, stop in (entry["data_offsets"] for entry in places.values())), default=0)
    except OSError as error:
        raise ModelDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelDirectoryError(f"{path} is not a safetensors file: its header cannot be read") from error
    if size != end:
        raise ModelDirectoryError(f"{path} has {size} bytes; its header says {end}")
    return found


def check_weights(directory: Path) -> None:
    """Raise `ModelDirectoryError` for a weight file that is missing or not whole; the tensors are not read."""
    for path in weight_files(directory):
        header(path)


def check_directory(directory: Path) -> None:
    """Raise `ModelDirectoryError` for what can be seen of an unusable policy without building it."""
    fields = read_config(directory)
    path = directory / CONFIG_FILE
    check_fields(fields, str(path))
    vocabulary = fields.get("vocab_size")
    check_weights(directory)
    # Who trains needs none; who turns chats into tokens does.
    if not (directory / TOKENIZER_FILE).is_file():
        raise ModelDirectoryError(f"{directory / TOKENIZER_FILE} does not exist; a run's policy has a tokenizer")
    if highest_token(read_json(directory / TOKENIZER_FILE)) < 0:
        raise ModelDirectoryError(
            f"{directory / TOKENIZER_FILE}: the tokenizer has no ids; allowed is one whose model has a vocabulary"
        )
    if vocabulary is not None:  # else it is the family's own, which transformers knows
        check_tokenizer(directory, vocabulary)


def highest_token(tokenizer: dict[str, Any]) -> int:
    """The highest id in a `tokenizer.json`; -1 where it has none."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[int] = [-1]
    if isinstance(vocabulary, dict):
        ids.extend(number for number in vocabulary.values() if isinstance(number, int))
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids.extend(token["id"] for token in tokens if isinstance(token.get("id"), int))
    return max(ids)


def check_tokenizer(directory: Path, vocabulary: int) -> None:
    """Raise `ModelDirectoryError` if the tokenizer beside the model writes ids that it has no embedding for.

    A model may have more embeddings than the tokenizer has tokens: many are padded to a multiple of 64.
    """
    path = directory / TOKENIZER_FILE
    if not path.exists():
        return
    highest = highest_token(read_json(path))
    if highest >= vocabulary:
        raise ModelDirectoryError(
            f"{path}: the tokenizer has the id {highest}; vocab_size in {CONFIG_FILE} is {vocabulary}, so ids up to "
            f"{vocabulary - 1} are allowed"
        )
