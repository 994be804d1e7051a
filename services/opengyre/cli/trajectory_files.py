"""Files of `gyre trajectory tree`: the log as a map into memory, the files beside it, and a tokenizer's directory."""

import mmap
from collections.abc import Callable
from pathlib import Path

from opengyre.cli.stack import StackError
from opengyre.formats import Forest, Source

MAX_BESIDE = 2**30
"""Bytes of a file that a log refers to."""
SUBAGENTS = "subagents"
"""Where Claude Code keeps the logs of a session's sub-agents, in a folder named after the session."""


def open_log(path: Path) -> Source:
    """The log in `path`; raises `StackError` of one sentence."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise StackError(f"{path} cannot be read: {error.strerror}") from error
    return Source(path.name, data, _beside(path))


def _beside(path: Path) -> Callable[[str], bytes | None]:
    folder = path.parent.resolve()
    prefix = path.name.removesuffix("trajectory.json") if path.name.endswith("trajectory.json") else ""

    def read(name: str) -> bytes | None:
        # A log names files of its own folder; it does not get to name others.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        places = [folder / name, folder / f"{prefix}{name}", folder / path.stem / SUBAGENTS / name]
        if not set(name) & set("*?[]/"):
            places += sorted(folder.glob(f"*_{name}"))
        return next((data for place in places if (data := _content(place, folder)) is not None), None)

    return read


def _content(place: Path, folder: Path) -> bytes | None:
    try:
        inside = place.resolve().parent.is_relative_to(folder)
        return place.read_bytes() if inside and place.is_file() and place.stat().st_size <= MAX_BESIDE else None
    except (OSError, ValueError):
        return None


def forest_for(tokenizer: Path | None) -> Forest:
    """Trees of messages, or of the tokens of the tokenizer in a directory; raises `StackError`."""
    if tokenizer is None:
        return Forest()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise StackError("--tokenizer needs the library tokenizers: pip install 'opengyre[formats]'") from error
    file = tokenizer if tokenizer.is_file() else tokenizer / "tokenizer.json"
    try:
        text = file.read_bytes()
    except OSError as error:
        raise StackError(
            f"--tokenizer {tokenizer}: allowed is a directory with a tokenizer.json ({error.strerror})"
        ) from error
    try:
        loaded = Tokenizer.from_buffer(text)
    except Exception as error:
        raise StackError(f"{file} is no tokenizer: {error}") from error
    special = frozenset(number for number, token in loaded.get_added_tokens_decoder().items() if token.special)
    return Forest(
        encode=lambda text: loaded.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: loaded.decode(list(ids), skip_special_tokens=False),
        special=special,
    )
