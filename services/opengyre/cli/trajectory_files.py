"""Files of `gyre trajectory tree`: the log as a map into memory, the files beside it, and a tokenizer's directory."""

import mmap
from collections.abc import Callable
from pathlib import Path

from opengyre.cli import stack as stacks
from opengyre.cli.stack import StackError
from opengyre.formats import Forest, Source
from opengyre.shared.blobs import reference

MAX_BESIDE = 2**30
"""Bytes of a file that a log refers to."""
BLOB = "sha256:"
SUBAGENTS = "subagents"
"""Where Claude Code keeps the logs of a session's sub-agents, in a folder named after the session."""


def blob_store(state_dir: Path | None) -> Path:
    """Where the stack keeps its blobs."""
    return stacks.directory(state_dir) / "blobs"


def open_log(path: Path, blobs: Path | None = None) -> Source:
    """The log in `path`, and what lies beside it, or as a blob in `blobs`; raises `StackError` of one sentence."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise StackError(f"{path} cannot be read: {error.strerror}") from error
    beside = _beside(path)

    def named(name: str) -> bytes | None:
        return _blob(blobs, name) if name.startswith(BLOB) and blobs is not None else beside(name)

    return Source(path.name, data, named)


def _blob(blobs: Path, ref: str) -> bytes | None:
    digest = ref.removeprefix(BLOB)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        return None
    content = _content(blobs / digest[:2] / digest, blobs.resolve())
    return content if content is not None and reference(content) == ref else None


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
