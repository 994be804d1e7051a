"""How a gradient lies in a file: safetensors, float32, tensors in the order of their names. Needs no torch."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 4
"""Bytes of a number."""


def size_of(shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return WIDTH * math.prod(shape)


def header(shapes: Mapping[str, Sequence[int]]) -> bytes:
    """What stands before the first tensor; the numbers follow, tensor by tensor, by `sorted(shapes)`.

    Byte for byte what `safetensors` writes (https://huggingface.co/docs/safetensors, "Format"): the length of the rest
    in 8 bytes, little-endian, then JSON, with spaces up to a multiple of 8.
    """
    at = 0
    fields: dict[str, Any] = {}
    for name in sorted(shapes):
        end = at + size_of(shapes[name])
        fields[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
