"""The renderer that a model directory asks for: the tiny policy's own, or that of `transformers`."""

from pathlib import Path

from opengyre.chat.hf import HfRenderer
from opengyre.policy.directory import TOKENIZER_FILE, read_json
from opengyre.tiny import template
from opengyre.tiny.tokenizer import TinyTokenizer


def is_tiny(directory: Path) -> bool:
    """Whether the tokenizer has all markers of the tiny policy's template; raises `ModelDirectoryError`."""
    added = read_json(directory / TOKENIZER_FILE).get("added_tokens")
    tokens = {token.get("content") for token in added if isinstance(token, dict)} if isinstance(added, list) else set()
    return tokens >= set(template.SPECIALS)


def open_renderer(directory: Path) -> TinyTokenizer | HfRenderer:
    """The renderer of a model directory; raises `ModelDirectoryError`."""
    return TinyTokenizer.load(directory) if is_tiny(directory) else HfRenderer.load(directory)
