"""Texts to token ids and back by a fast tokenizer. Thread-safe once made.

Two copies of one tokenizer: one knows special tokens in a text, for what a template wrote; the other takes all text as
text, so that "<|im_end|>" in a command's output ends no turn.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from opengyre.chat.template import Text

LONG: Final = 1 << 14
"""From so many characters a text is encoded as a batch of one, which lets the interpreter's other threads run."""
UNBOUNDED: Final = 1 << 40
"""Characters of a token, where nothing bounds them."""
COMPOSED: Final = 4
"""Characters that a normalisation of Unicode makes one, at most."""


def longest_token(described: dict[str, Any]) -> int:
    """Characters of text that a token stands for at most; `described` is the content of `tokenizer.json`.

    Bounded for byte-level BPE, and for BPE that falls back on bytes; others may drop text or take it as unknown.
    """
    model = described.get("model") or {}
    added = [token for token in described.get("added_tokens") or [] if not token.get("special")]
    kinds = set(_kinds(described.get("pre_tokenizer"))) | set(_kinds(described.get("decoder")))
    bounded = model.get("type") == "BPE" and ("ByteLevel" in kinds or model.get("byte_fallback"))
    normalizers = set(_kinds(described.get("normalizer"))) - {"Sequence"}
    if not bounded or not normalizers <= {"NFC", "Prepend", "Replace"}:
        return UNBOUNDED
    if any(token.get("lstrip") or token.get("rstrip") for token in described.get("added_tokens") or []):
        return UNBOUNDED
    # A character of a byte-level token is a byte, and a character of text is a byte or more.
    words = [*model["vocab"], *(token["content"] for token in added)]
    return max(map(len, words)) * (COMPOSED if "NFC" in normalizers else 1)


def _kinds(part: Any) -> list[str]:
    """Types of a part of a tokenizer, and of what it is made of."""
    if not isinstance(part, dict):
        return []
    inner = [item for value in part.values() if isinstance(value, list) for item in value]
    return [str(part.get("type")), *(kind for item in inner for kind in _kinds(item))]


class Codec:
    def __init__(self, tokenizer: Tokenizer) -> None:
        described = tokenizer.to_str()
        self._markup = Tokenizer.from_str(described)
        self._plain = Tokenizer.from_str(described)
        for one in (self._markup, self._plain):
            one.no_truncation()
            one.no_padding()
        self._plain.encode_special_tokens = True
        added = self._markup.get_added_tokens_decoder()
        self.specials: dict[str, int] = {token.content: number for number, token in added.items() if token.special}
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self.size = max(self._markup.get_vocab(with_added_tokens=True).values()) + 1
        self.longest = longest_token(json.loads(described))
        self._begin = self._before_text()

    def _before_text(self) -> list[int]:
        """What the tokenizer puts in front of a text with which a context begins."""
        plain = self._plain.encode("a", add_special_tokens=False).ids
        whole = self._plain.encode("a", add_special_tokens=True).ids
        for place in range(len(whole) - len(plain) + 1):
            if whole[place : place + len(plain)] == plain:
                return whole[:place]
        return []

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return _encode(self._plain, text)

    def begin(self, text: str) -> list[int]:
        """Token ids of plain text with which a context begins."""
        return [*self._begin, *self.encode(text)]

    def markup(self, text: Text) -> list[int]:
        """Token ids of what a template wrote."""
        if text.guard not in text.text or self._split is None:
            return _encode(self._markup, text.text)
        ids: list[int] = []
        for part in self._split.split(text.text):
            if part in self.specials:
                ids.append(self.specials[part])
            elif part:
                ids.extend(self.encode(part.replace(text.guard, "")))
        return ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Text of token ids; special tokens are left out unless `specials`."""
        return self._plain.decode(list(ids), skip_special_tokens=not specials)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if len(text) < LONG:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
