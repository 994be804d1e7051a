"""What is wrong with a value of a TOML table that is not its field's, in a sentence. Pure."""

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

KINDS: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table"}


def wrong_type(error: msgspec.ValidationError, table: Any, kind: type[Any], prefix: str = "") -> str:
    """The field with `prefix` before it, its value, and what is allowed; `kind` is what the table should be."""
    at = re.search(r"`\$([\w.\[\]]+)`", str(error))
    names = re.findall(r"\w+", at[1]) if at else []
    lacking = re.search(r"missing required field `(\w+)`", str(error))
    if at is None and lacking is None:
        return f"{prefix.removesuffix('.')}: {error}" if prefix else str(error)
    value: Any = table
    options: list[tuple[Any, msgspec.Meta | None]] = [(kind, None)]
    for name in names:
        value = _inside(value, name)
        options = _of_field(options, name)
    place = f"{prefix}{at[1].removeprefix('.')}" if at else prefix.removesuffix(".")
    if lacking is not None:
        place = f"{place}.{lacking[1]}" if place else lacking[1]
        return f"{place} is missing; allowed: {_allowed(_of_field(options, lacking[1]))}"
    return f"{place} is {value!r}; allowed: {_allowed(options)}"


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    return value[int(name)] if isinstance(value, list) and name.isdigit() else None


def _of_field(options: list[tuple[Any, msgspec.Meta | None]], name: str) -> list[tuple[Any, msgspec.Meta | None]]:
    for option, _ in options:
        if name.isdigit() and get_origin(option) in (tuple, list):
            return list(_options(get_args(option)[0]))
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            hint = get_type_hints(option, include_extras=True).get(name)
            return [] if hint is None else list(_options(hint))
    return []


def _options(hint: Any, meta: msgspec.Meta | None = None) -> Iterator[tuple[Any, msgspec.Meta | None]]:
    """What a field may be: types with their ranges, and single values. None is what a recipe leaves out."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from _options(parts[0], next((one for one in parts[1:] if isinstance(one, msgspec.Meta)), meta))
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _options(part, meta)
    elif origin is Literal:
        yield from ((repr(part), None) for part in parts)
    elif hint is not type(None):
        yield hint, meta


def _allowed(options: list[tuple[Any, msgspec.Meta | None]]) -> str:
    return ", ".join(_said(option, meta) for option, meta in options) or "what docs/recipes.md says"


def _said(option: Any, meta: msgspec.Meta | None) -> str:
    if isinstance(option, str):
        return option
    if get_origin(option) in (tuple, list):
        return "a list"
    if isinstance(option, type) and issubclass(option, msgspec.Struct):
        return KINDS[dict]
    return KINDS.get(option, repr(option)) + (_range(meta) if meta is not None else "")


def _range(meta: msgspec.Meta) -> str:
    low = f" above {meta.gt:g}" if meta.gt is not None else f" from {meta.ge}" if meta.ge is not None else ""
    high = f" up to {meta.le}" if meta.le is not None else f" below {meta.lt:g}" if meta.lt is not None else ""
    return low + high
