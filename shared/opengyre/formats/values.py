"""Looking into JSON that others wrote: every look answers, whatever is there. Pure."""

import re
from typing import Any

import msgspec

MAX_TOKEN = 2**31
BOM = b"\xef\xbb\xbf"
_LONE = re.compile(
    # One literal begin, which is searched for faster than two.
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]))"
)
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # A pair.
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"  # Half of one.
    rb"|\\.",
    re.DOTALL,
)


NOT_UTF8 = "it is not UTF-8"


class FormatError(ValueError):
    """The file cannot be read as what it is taken for; one sentence without the file's name."""


def mended(data: Any) -> Any:
    """JSON that others wrote, without the mark of UTF-8 at its begin and with U+FFFD for each half of a surrogate pair,
    which JavaScript writes where it cut a text inside a character. The buffer itself where it has neither, or
    is an archive."""
    if bytes(data[:2]) == b"PK":
        return data
    marked = bytes(data[:3]) == BOM
    halves = data.find(b"\\ud") >= 0 or data.find(b"\\uD") >= 0
    if not halves or _LONE.search(data) is None:
        return bytes(data[3:]) if marked else data
    # Every backslash of JSON is in a text, so a walk over the escapes tells an escaped backslash from an escape.
    return _ESCAPES.sub(lambda one: one[0] if len(one[0]) != 6 else b"\\ufffd", data[3:] if marked else data[:])


def decode(data: Any) -> Any:
    """The JSON value in a buffer; raises `FormatError` saying where it is none."""
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise FormatError("its JSON is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise FormatError(NOT_UTF8) from error
    except msgspec.DecodeError as error:
        if "UTF-8" in str(error):
            raise FormatError(NOT_UTF8) from error
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
