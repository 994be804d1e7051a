"""The tiny policy's tokenizer: byte-level BPE of at most 512 tokens, and its chat template by token.

Every text can be spelled, since all 256 bytes are tokens. Text never becomes a special token, whatever it says: only
the template writes those.

Prefix property: for messages `h`, sampled ids `s` and new messages `n`,
`render(h) + s + render_suffix(n, closed=s ends with the end-of-turn token)` is
`render(h + [assistant message with token_ids s] + n)`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.tiny import template, tools
from opengyre.tiny.config import ModelDirectoryError

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
MAX_VOCABULARY: Final = 512
LONG: Final = 1 << 14
"""From so many characters a text is encoded as a batch of one, which lets the interpreter's other threads run."""

Message = Mapping[str, Any]


class TinyTokenizer:
    """Texts and chats to token ids and back. Thread-safe once made."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Text such as "<|end|>" in a command's output must not end a turn.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._specials: dict[str, int] = {}
        for special in template.SPECIALS:
            token = tokenizer.token_to_id(special)
            if token is None:
                raise ModelDirectoryError(f"{TOKENIZER_FILE}: the special token {special} is missing")
            self._specials[special] = token
        # A character of a byte-level token is a byte, and a character of text is a byte or more.
        words = tokenizer.get_vocab(with_added_tokens=True)
        self._longest = max(len(word) for word in words if word not in self._specials)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = MAX_VOCABULARY) -> "TinyTokenizer":
        """A tokenizer of at most `vocab_size` tokens, deterministic in `texts`."""
        if not 256 + len(template.SPECIALS) <= vocab_size <= MAX_VOCABULARY:
            lowest = 256 + len(template.SPECIALS)
            raise ValueError(f"vocab_size is {vocab_size}; allowed are values from {lowest} to {MAX_VOCABULARY}")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(special, special=True, normalized=False) for special in template.SPECIALS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, directory: Path) -> "TinyTokenizer":
        """The tokenizer of a model directory."""
        path = directory / TOKENIZER_FILE
        if not path.exists():
            raise ModelDirectoryError(f"{path} does not exist; a model directory has a {TOKENIZER_FILE}")
        return cls(Tokenizer.from_str(path.read_text()))

    def files(self) -> dict[str, str]:
        """The content of the tokenizer's files, by name."""
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": template.BOS,
            "eos_token": template.END,
            "pad_token": template.END,
            "chat_template": template.JINJA,
            "clean_up_tokenization_spaces": False,
        }
        return {
            TOKENIZER_FILE: self._tokenizer.to_str(pretty=True),
            TOKENIZER_CONFIG_FILE: json.dumps(fields, indent=2, sort_keys=True) + "\n",
        }

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into a model directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (directory / name).write_text(content)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token that is not special: no token stands for more characters of text."""
        return self._longest

    @property
    def bos_id(self) -> int:
        return self._specials[template.BOS]

    @property
    def end_id(self) -> int:
        """The end of an assistant's turn: the stop token."""
        return self._specials[template.END]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self.end_id,)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        if len(text) < LONG:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def begin(self, text: str) -> list[int]:
        """Token ids of plain text with which a context begins."""
        return [self.bos_id, *self.encode(text)]

    def tools_prompt(self, offered: Sequence[tools.Tool]) -> str:
        """What has to be said of these tools in front of the conversation (a system message); may be empty."""
        return tools.prompt_of(offered)

    def read_turn(self, text: str, offered: Sequence[tools.Tool], choice: str | None = None) -> tools.Said:
        """A completion's text as content and tool calls; `choice` is the call that was forced."""
        return tools.read(text, offered, choice)

    def settled(self, text: str, offered: Sequence[tools.Tool], choice: str | None = None) -> str:
        """The beginning of the content that stays, whatever follows the beginning `text` of a completion."""
        return tools.settled(text, offered, choice)

    def opening(self, offered: Sequence[tools.Tool], choice: str) -> list[int]:
        """Token ids with which a turn begins that is to call the tool `choice`."""
        begin = tools.opening(offered, choice)
        return self.encode(" " + begin) if begin else []

    @property
    def call_end(self) -> str:
        """What the text of a tool call ends with, where the turn may go on after it."""
        return tools.CLOSE

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def completion_text(self, sampled: Sequence[int]) -> str:
        """What the assistant said: the text before the end of its turn, stripped."""
        ids = list(sampled)
        if self.end_id in ids:
            ids = ids[: ids.index(self.end_id)]
        return self.decode(ids).strip()

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
        ids: list[int] = []
        for piece in template.pieces(messages, generation_prompt=generation_prompt):
            match piece:
                case template.Ids(taken):
                    ids.extend(taken)
                case template.Text(text):
                    ids.extend(self.encode(text))
                case template.Special(token):
                    if token != template.END or ids[-1] != self.end_id:
                        ids.append(self._specials[token])
        return ids

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[tools.Tool] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat (OpenAI-style messages), ready for the assistant to speak; what has to be said of the
        tools stands in front.

        An assistant message may carry `token_ids`, the ids that were sampled; they are then used as they are. Raises
        `TemplateError` for what cannot be rendered.
        """
        told = self.tools_prompt(tools)
        first: list[Message] = [{"role": "system", "content": told}] if told else []
        return [self.bos_id, *self._render([*first, *messages], generation_prompt=generation_prompt)]

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[tools.Tool] = (),  # noqa: ARG002 - one signature for all renderers; they are told in front
        closed: bool = True,
        generation_prompt: bool = True,
    ) -> list[int]:
        """What follows a sampled turn: its end where the policy did not sample it (not `closed`), the new messages."""
        ids = self._render(messages, generation_prompt=generation_prompt)
        return ids if closed else [self.end_id, *ids]
