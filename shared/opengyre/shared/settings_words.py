"""What a setting may be, in our words: from the kind of pydantic's error, its context and the field. Pure.

Kinds are those of https://docs.pydantic.dev/latest/errors/validation_errors/ that the settings can have; a kind that
is not known here has no sentence, and the caller says what pydantic says.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

PLAIN: Final = {
    "bool_parsing": "allowed are true and false",
    "bool_type": "allowed are true and false",
    "string_type": "allowed is a text",
    "path_type": "allowed is a path",
    "tuple_type": "allowed is a list of texts",
}
PATTERNS: Final = {
    "^/": "allowed is a path that begins with /",
    "^/[^=]+=/[^=]*$": "allowed is a text like /in/the/sandbox=/here",
}
BOUNDS: Final = ("ge", "gt", "le", "lt")
NUMBERS: Final = ("int_", "float_", "greater_than", "less_than", "finite_number")


def allowed(kind: str, context: Mapping[str, Any], field: FieldInfo | None = None) -> str | None:
    """The end of a sentence, "allowed are whole numbers from 1 to 5"; None for a kind that is not known.

    Both bounds of a number are those of `field`; without it, the one that `context` names.
    """
    if kind.startswith(NUMBERS):
        return f"allowed are {_numbers(kind, context, field)}"
    match kind:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            return f"allowed is {context['expected']}"
        case "string_too_short" | "too_short":  # the latter of a secret
            return f"allowed is a text of at least {context['min_length']} character(s)"
        case "string_pattern_mismatch":
            pattern = context["pattern"]
            return PATTERNS.get(pattern, f"allowed is a text that matches {pattern}")
        case "model_type" if field is not None:
            (model,) = (one for one in _types(field.annotation) if issubclass(one, BaseModel))
            return f"allowed is a table of {', '.join(model.model_fields)}"
        case _:
            return PLAIN.get(kind)


def _numbers(kind: str, context: Mapping[str, Any], field: FieldInfo | None) -> str:
    bounds = dict(context)
    whole = kind.startswith("int_")
    if field is not None:
        whole = int in _types(field.annotation)
        bounds |= {name: getattr(entry, name) for name in BOUNDS for entry in field.metadata if hasattr(entry, name)}
    words = "whole numbers" if whole else "numbers"
    if "ge" in bounds:
        words += f" from {_shown(bounds['ge'])}"
    elif "gt" in bounds:
        words += f" above {_shown(bounds['gt'])}"
    if "le" in bounds:
        words += f" to {_shown(bounds['le'])}" if "ge" in bounds else f" up to {_shown(bounds['le'])}"
    elif "lt" in bounds:
        words += f" below {_shown(bounds['lt'])}"
    elif "ge" in bounds:
        words += " on"
    return words


def _shown(bound: float) -> str:
    """A bound as it would be written."""
    return str(int(bound)) if bound == int(bound) else str(bound)


def _types(annotation: Any) -> Iterator[type]:
    """The types of which a value may be."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for one in typing.get_args(annotation):
            yield from _types(one)
    elif isinstance(annotation, type):
        yield annotation
