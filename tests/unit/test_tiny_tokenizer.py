"""The tokenizer spells everything, and a longer chat extends the shorter one token by token."""

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.shelltasks.demonstrate import demonstrations
from opengyre.shelltasks.warmstart import train_tokenizer
from opengyre.tiny import template
from opengyre.tiny.template import TemplateError

pytestmark = pytest.mark.torch

TOKENIZER = train_tokenizer(demonstrations(400, seed=1))

texts = st.text(max_size=40)
later = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "tool", "content": text}, texts),
        st.builds(lambda text: {"role": "user", "content": text}, texts),
    ),
    max_size=3,
)


@given(texts)
def test_every_text_survives_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.sampled_from(template.SPECIALS), min_size=1, max_size=4), texts)
def test_text_never_becomes_a_special_token(specials: list[str], text: str) -> None:
    ids = TOKENIZER.encode(text.join(specials))
    assert all(token >= len(template.SPECIALS) for token in ids)


@settings(max_examples=200)
@given(texts, st.lists(st.integers(6, TOKENIZER.vocab_size - 1), max_size=12), st.booleans(), later)
def test_a_longer_chat_extends_prompt_and_sample(task: str, sampled: list[int], ended: bool, new: list[dict]) -> None:
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": task}]
    ids = [*sampled, TOKENIZER.end_id] if ended else sampled
    whole = TOKENIZER.render([*first, {"role": "assistant", "token_ids": ids}, *new])
    assert whole == TOKENIZER.render(first) + ids + TOKENIZER.render_suffix(new, closed=ended)


def test_training_is_deterministic_and_small() -> None:
    again = train_tokenizer(demonstrations(400, seed=1))
    assert again.files() == TOKENIZER.files()
    assert TOKENIZER.vocab_size <= 512


def test_the_jinja_template_says_the_same() -> None:
    messages = [*demonstrations(8, seed=2)[7].messages()]
    text = jinja2.Environment().from_string(template.JINJA).render(messages=messages, add_generation_prompt=True)
    ids: list[int] = []
    for part in text.replace("<|", "\0<|").replace("|>", "|>\0").split("\0"):
        if part in template.SPECIALS:
            ids.append(template.SPECIALS.index(part))
        else:
            ids.extend(TOKENIZER.encode(part))
    assert ids == TOKENIZER.render(messages)


def test_the_sampled_text_ends_with_the_turn() -> None:
    ids = TOKENIZER.encode(" echo a > b")
    assert TOKENIZER.completion_text([*ids, TOKENIZER.end_id]) == "echo a > b"
    assert TOKENIZER.completion_text(ids) == "echo a > b"


def test_a_shell_tool_call_is_its_command() -> None:
    call = {"function": {"name": "shell", "arguments": '{"command": "ls"}'}}
    asked = {"role": "user", "content": "look"}
    called = TOKENIZER.render([asked, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert called == TOKENIZER.render([asked, {"role": "assistant", "content": "ls"}])


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"role": "narrator", "content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "text"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "assistant", "tool_calls": [{}, {}]}, "tool call"),
    ],
)
def test_what_cannot_be_rendered_is_named(message: dict, names: str) -> None:
    with pytest.raises(TemplateError, match=names):
        TOKENIZER.render([message])
