"""The renderer of a model directory in Hugging Face's layout: its own tokenizer and chat template, by `transformers`.

Token ids are those that `apply_chat_template` and the tokenizer make, but for text in messages that looks like a
special token: that stays text. Turns that were sampled stand in their own ids.

Prefix property: for messages `h`, sampled ids `s` and new messages `n`, where `render_suffix(n)` is not None,
`render(h) + s + render_suffix(n, closed=s ends with a stop token)` is
`render(h + [assistant message with token_ids s] + n)`.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from opengyre.chat import hermes
from opengyre.chat.codec import UNBOUNDED, Codec
from opengyre.chat.messages import ChatError
from opengyre.chat.template import ChatTemplate, Ids, Text
from opengyre.policy.directory import EXTRA, TOKENIZER_FILE, read_config, read_json
from opengyre.tiny.config import CONFIG_FILE, ModelDirectoryError
from opengyre.tiny.tools import CLOSE, Said, Tool

GENERATION_FILE: Final = "generation_config.json"

Message = Mapping[str, Any]


class HfRenderer:
    """Texts and chats to token ids and back. Thread-safe once made; `template` is None for a model without one."""

    def __init__(
        self, codec: Codec, template: ChatTemplate | None, stops: Sequence[int], vocabulary: int | None = None
    ) -> None:
        self._codec = codec
        self._template = template
        self._vocabulary = max(vocabulary or 0, codec.size)
        end = self._turn_end()
        self._stops = tuple(dict.fromkeys(([] if end is None else [end]) + list(stops)))

    @classmethod
    def load(cls, directory: Path) -> "HfRenderer":
        """The renderer of a model directory; raises `ModelDirectoryError`. Reads local files only and runs no code of
        the model's; the import of `transformers` takes seconds the first time."""
        fields = read_config(directory)
        read_json(directory / TOKENIZER_FILE)
        if importlib.util.find_spec("transformers") is None:
            raise ModelDirectoryError(
                f"{directory / TOKENIZER_FILE}: the chats of a model of type {fields['model_type']!r} are rendered by "
                f"the package transformers; {EXTRA}"
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            codec = Codec(tokenizer.backend_tokenizer)
        except Exception as error:  # The tokenizer's own class meets the files, so its faults are of any type.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ModelDirectoryError(
                f"{directory / TOKENIZER_FILE}: no tokenizer can be made of it: {reason}"
            ) from error
        return cls(codec, template_of(tokenizer, codec), _stops(directory, fields, tokenizer), fields.get("vocab_size"))

    def _turn_end(self) -> int | None:
        """The special token with which the template ends a turn of the assistant."""
        if self._template is None:
            return None
        try:
            after = self._template.pieces(
                [{"role": "user", "content": "a"}, {"role": "assistant", "token_ids": ()}], lambda _: "b"
            )[-1]
        except ChatError:
            return None
        assert isinstance(after, Text)
        ids = self._codec.markup(Text(after.text.lstrip(), after.guard))
        return ids[0] if ids and ids[0] in self._codec.specials.values() else None

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: every id that it may sample is below."""
        return self._vocabulary

    @property
    def longest_token(self) -> int:
        """No token of text stands for more characters; without bound where the template drops text."""
        return UNBOUNDED if self._template is not None and self._template.rewrites else self._codec.longest

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends a turn: the template's end of a turn, and what `generation_config.json`, `config.json` and the
        tokenizer say."""
        return self._stops

    @property
    def rewrites(self) -> bool:
        """Whether the template changes what stands before a new message (drops thoughts, moves tools): a longer
        history is then rendered as a whole and matched again, where a suffix cannot be had."""
        return self._template is not None and self._template.rewrites

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        return self._codec.encode(text)

    def begin(self, text: str) -> list[int]:
        """Token ids of plain text with which a context begins."""
        return self._codec.begin(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self._codec.decode(ids)

    def _before_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[: next((place for place, token in enumerate(ids) if token in self._stops), len(ids))]

    def completion_text(self, sampled: Sequence[int]) -> str:
        """What the assistant said: the text before the end of its turn, stripped."""
        return self._codec.decode(self._before_stop(sampled)).strip()

    def _said(self, ids: Ids) -> str:
        return self._codec.decode(self._before_stop(ids), specials=True)

    def _chats(self) -> ChatTemplate:
        if self._template is None:
            raise ChatError(
                "the model has no chat template, so it takes text prompts only (/v1/completions, or harness.prompt = "
                "transcript)"
            )
        return self._template

    def _after(self, text: Text, *, closed: bool) -> list[int]:
        """What the template wrote after a sampled turn; `closed`: without the end of the turn, which was sampled."""
        ids = self._codec.markup(text)
        if closed:
            for place in range(min(2, len(ids))):
                if ids[place] in self._stops and not self._codec.decode(ids[:place]).strip():
                    return ids[place + 1 :]
        return ids

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat (OpenAI-style messages), ready for the assistant to speak.

        An assistant message may carry `token_ids`, the ids that were sampled; they are then used as they are. Raises
        `ChatError` for what cannot be rendered.
        """
        ids: list[int] = []
        closed = False
        pieces = self._chats().pieces(messages, self._said, tools=tools, generation_prompt=generation_prompt)
        for piece in pieces:
            if isinstance(piece, Text):
                ids.extend(self._after(piece, closed=closed))
            else:
                ids.extend(piece)
                closed = bool(piece) and piece[-1] in self._stops
        return ids

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        closed: bool = True,
        generation_prompt: bool = True,
    ) -> list[int] | None:
        """What follows a sampled turn: its end where the policy did not sample it (not `closed`), the new messages.

        None where the template changes what stands before these messages, or writes them by it. Raises `ChatError`.
        """
        text = self._chats().suffix(messages, tools=tools, generation_prompt=generation_prompt)
        return None if text is None else self._after(text, closed=closed)

    def tools_prompt(self, offered: Sequence[Tool]) -> str:
        """What is said of these tools, where the template does not say it in its own way; may be empty."""
        return hermes.prompt_of(offered)

    def read_turn(self, text: str, offered: Sequence[Tool], choice: str | None = None) -> Said:  # noqa: ARG002 - one signature for all renderers
        """A completion's text as content and tool calls."""
        return hermes.read(text, offered)

    def settled(self, text: str, offered: Sequence[Tool], choice: str | None = None) -> str:
        """The beginning of the content that stays, whatever follows the beginning `text` of a completion."""
        return hermes.settled(text, offered, choice)

    def opening(self, offered: Sequence[Tool], choice: str) -> list[int]:
        """Token ids with which a turn begins that is to call the tool `choice`."""
        begin = hermes.opening(offered, choice)
        return self._codec.markup(Text(begin, "\0"))

    @property
    def call_end(self) -> str:
        """What the text of a tool call ends with, where the turn may go on after it."""
        return CLOSE


def template_of(tokenizer: Any, codec: Codec) -> ChatTemplate | None:
    """The tokenizer's chat template; None where it has none."""
    if not tokenizer.chat_template:
        return None

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # A template is code of the model's: its faults are of any type.
            raise ChatError(
                f"the model's chat template refuses the messages: {' '.join(str(error).split())}"
            ) from error

    try:
        source = tokenizer.get_chat_template(tools=[{}])
    except ValueError as error:
        raise ModelDirectoryError(f"{tokenizer.name_or_path}: {' '.join(str(error).split())}") from error
    return ChatTemplate(render, source, list(codec.specials))


def _stops(directory: Path, fields: dict[str, Any], tokenizer: Any) -> list[int]:
    """Ids that end a turn, by the files."""
    path = directory / GENERATION_FILE
    generation = read_json(path) if path.is_file() else {}
    given: list[Any] = []
    for value in (generation.get("eos_token_id"), fields.get("eos_token_id"), tokenizer.eos_token_id):
        given += value if isinstance(value, list) else [value]
    for token in given:
        if token is not None and (type(token) is not int or token < 0):
            raise ModelDirectoryError(
                f"{directory}: eos_token_id is {token!r} in {GENERATION_FILE} or {CONFIG_FILE}; allowed are whole "
                "numbers from 0, or a list of these"
            )
    return [token for token in given if token is not None]
