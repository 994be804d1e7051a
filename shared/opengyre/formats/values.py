"""Looking into JSON that others wrote: every look answers, whatever is there. Pure."""

from typing import Any

import msgspec

MAX_TOKEN = 2**31


class FormatError(ValueError):
    """The file cannot be read as what it is taken for; one sentence without the file's name."""


def decode(data: Any) -> Any:
    """The JSON value in a buffer; raises `FormatError` saying where it is none."""
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise FormatError("its JSON is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise FormatError("it is not UTF-8") from error
    except msgspec.DecodeError as error:
        raise FormatError(f"it is no JSON: {error}") from error


def decoded(data: Any) -> Any:
    """The JSON value in a buffer or text; None where it is none."""
    try:
        return decode(data)
    except FormatError:
        return None


def obj(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def seq(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def string(value: Any) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def number(value: Any) -> int | None:
    """The value if it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def compact(value: Any) -> str:
    """The value as JSON on one line, its keys in the order in which they came."""
    return msgspec.json.encode(value).decode()


def token_ids(value: Any) -> list[int] | None:
    """The value if it is a list of token ids (each in [0, 2**31)), else None."""
    if not isinstance(value, list):
        return None
    if all(type(one) is int and 0 <= one < MAX_TOKEN for one in value):
        return value
    return None


def floats(value: Any) -> list[float] | None:
    """The value if it is a list of numbers, else None."""
    if isinstance(value, list) and all(type(one) in (int, float) for one in value):
        return [float(one) for one in value]
    return None
