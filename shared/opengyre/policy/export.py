"""A policy as a model directory for others: what `transformers` and vLLM open, without what only runs need.

The weights are copied as they are: a version of the tiny policy is a `LlamaForCausalLM` already.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from opengyre.policy.describe import describe
from opengyre.policy.directory import read_config, weight_files
from opengyre.tiny.config import ModelDirectoryError
from opengyre.weights.canary import CANARY_FILE
from opengyre.weights.manifest import MANIFEST_FILE, WeightsError, damaged, read, verify
from opengyre.weights.place import SUMS_FILE, beside, place

GENERATION_FILE: Final = "generation_config.json"
IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
LEFT_OUT: Final = {MANIFEST_FILE, CANARY_FILE, SUMS_FILE, "record.json"}
"""What is of the run, not of the model."""
SIDE: Final = (".json", ".jinja", ".txt", ".model")
"""Endings of the files beside the weights that are copied."""


def version_of(weights: Path, version: int | None = None) -> Path:
    """Directory of a version among the weights of a run, whose folder is `weights`; by default the newest that is
    whole. Raises `ModelDirectoryError` naming those that there are."""
    found = {int(path.name[1:]): path for path in sorted(weights.glob("v[0-9]*")) if path.name[1:].isdigit()}
    wanted = sorted(found, reverse=True) if version is None else [version]
    for number in wanted:
        if number in found and not damaged(found[number]):
            return found[number]
    which = "a whole version" if version is None else f"version {version}"
    there = ", ".join(map(str, sorted(found))) or "none"
    raise ModelDirectoryError(f"{weights} does not hold {which} of the weights; there are: {there}")


def export(source: Path, to: Path) -> None:
    """Copy the model in `source` to the new directory `to`; raises `ModelDirectoryError`, after which there is no more
    than before."""
    to = to.absolute()
    describe(source)
    if (source / MANIFEST_FILE).is_file():
        try:
            verify(read(source))
        except WeightsError as error:
            raise ModelDirectoryError(str(error)) from error
    if to.exists():
        raise ModelDirectoryError(f"{to} exists; name a directory that does not")
    try:
        with beside(to) as work:
            made = work / "made"
            made.mkdir()
            beside_weights = [path for path in source.iterdir() if path.suffix in SIDE and path.name not in LEFT_OUT]
            for path in {*weight_files(source), *beside_weights}:
                shutil.copyfile(path, made / path.name)
            if not (made / GENERATION_FILE).exists():
                fields: dict[str, Any] = read_config(source)
                ids = {name: fields[name] for name in IDS if fields.get(name) is not None}
                (made / GENERATION_FILE).write_text(json.dumps(ids, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            place(made, to)
    except OSError as error:
        raise ModelDirectoryError(f"{to} cannot be written: {error.strerror}") from error
