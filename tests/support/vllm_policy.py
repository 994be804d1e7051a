"""Policies of one shape with a real chat template: one that says what it was shown, and one that says anything.

Both in directories that `transformers` and vLLM open. The first was shown its turns in single bytes, where its
tokenizer would make few tokens of them: a text that is encoded again anywhere gives other ids than were sampled.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from opengyre.chat import hermes
from opengyre.chat.hf import HfRenderer
from opengyre.shelltasks.clone import CloneSettings, Example, clone
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from support.chats import CHATML, SPECIALS

CONTEXT = 8192
BASH: dict[str, Any] = {
    "name": "bash",
    "description": "Execute a bash command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"],
    },
}
"""As mini-swe-agent offers it."""
SURE = 20.0
"""How much surer than it has become of what it was shown: as if at a twentieth of the temperature."""
NEVER = 50.0
"""By so much the logit of a token that is not to be sampled is below the others, at least."""


def call(command: str) -> str:
    """The text of a turn that runs it."""
    return f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'


@dataclass(frozen=True)
class Shown:
    """A talk: turns, and what the tool answers to each but the last."""

    instruction: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    system: str = "shell"


def tokenizer_of(folder: Path, shown: Sequence[Shown]) -> HfRenderer:
    """Writes a tokenizer with SmolLM2's template into a directory, which needs a config yet; returns the renderer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS["chatml"]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for one in shown for text in (one.system, one.instruction, *one.turns, *one.answers)]
    tokenizer.train_from_iterator([*texts, hermes.prompt_of([BASH])] * 4, trainer)
    first, second, *_ = SPECIALS["chatml"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=first, eos_token=second, chat_template=CHATML)
    fast.save_pretrained(folder)
    config_of(tokenizer.get_vocab_size()).save(folder)
    return HfRenderer.load(folder)


def config_of(vocabulary: int) -> TinyConfig:
    return TinyConfig(vocabulary, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1)


def in_bytes(renderer: HfRenderer, text: str) -> list[int]:
    """The ids of a text, a token each byte."""
    return [token for byte in text for token in renderer.encode(byte)]


def examples(renderer: HfRenderer, one: Shown, forced: str | None) -> list[Example]:
    """A talk as the policy meets it; `forced`: the tool that its first turn is made to call."""
    messages = [{"role": "system", "content": one.system}, {"role": "user", "content": one.instruction}]
    tokens = renderer.render(messages, tools=[BASH])
    targets: list[int] = []
    for number, turn in enumerate(one.turns):
        if number:
            suffix = renderer.render_suffix([{"role": "tool", "content": one.answers[number - 1]}], tools=[BASH])
            assert suffix is not None
            tokens += suffix
        said = in_bytes(renderer, turn)
        if forced is not None and not number:
            opening = renderer.opening([BASH], forced)
            begun = renderer.decode(opening)
            assert turn.startswith(begun)
            tokens += opening
            said = in_bytes(renderer, turn[len(begun) :])
        said.append(renderer.stop_token_ids[0])
        targets += [-100] * (len(tokens) - 1 - len(targets))
        targets += said
        tokens += said
    return [Example(tokens, [*targets, -100])]


def told(renderer: HfRenderer, shown: Sequence[Shown]) -> TinyModel:
    """Says what it was shown, whether its first call is forced or not."""
    torch.manual_seed(0)
    model = TinyModel(config_of(renderer.vocab_size), 1)
    learned = [item for one in shown for forced in (None, "bash") for item in examples(renderer, one, forced)]
    loss = clone(model, learned, CloneSettings(steps=80, batch=len(learned)), 1)
    assert loss < 0.05, f"it was not learned: {loss:.3g}"
    with torch.no_grad():
        model.model.norm.weight.mul_(SURE)
    return model


def _is_text(text: str) -> bool:
    return bool(text) and text.isascii() and text.replace("\n", " ").isprintable()


def noise(renderer: HfRenderer) -> TinyModel:
    """Says any text, of many nats a token, and ends no turn.

    One direction of the residual stream is the same for all tokens and written by no layer, and the embeddings of
    tokens that are no text, which are also the output head's, look the other way; a turn begins after one that is text.
    """
    model = TinyModel(config_of(renderer.vocab_size), 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
            if "o_proj" in name or "down_proj" in name:
                parameter[0] = 0.0
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 1.0
        never = [token for token in range(renderer.vocab_size) if not _is_text(renderer.decode([token]))]
        assert set(renderer.stop_token_ids) <= set(never)
        embedding[never] = 0.0
        embedding[never, 0] = -NEVER
    return model


def tensors(model: TinyModel) -> Mapping[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logprobs(model: TinyModel, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first, by a forward in float64: what differs is the engine's rounding alone."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        found = torch.log_softmax(exact(torch.tensor([list(tokens)]))[0], -1)
    return [found[place - 1, tokens[place]].item() for place in range(1, len(tokens))]
