"""What is known of a prompt before it is encoded, and long texts, which are encoded in another way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.traj import Call
from opengyre.rollout.ask import Ask
from opengyre.rollout.history import History
from opengyre.rollout.messages import answer, extend
from opengyre.rollout.prompt import build, fewest_tokens, prompt_of
from opengyre.tiny import tokenizer
from opengyre.tiny.tokenizer import TinyTokenizer

TOKENIZER = TinyTokenizer.train(["    echo one two three", "    cat a.txt", "done"] * 9, 300)
ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12)
texts = st.text(st.sampled_from("echo \n€😀\ufffd"), max_size=30) | ids.map(TOKENIZER.decode)


def said(sampled: list[int], asked: list[dict]) -> tuple[History, str]:
    """A history of one call that answered `asked` with the tokens `sampled`, and its text."""
    history = History()
    prompt = build(asked, history, TOKENIZER)
    text = TOKENIZER.completion_text(sampled)
    history.take(
        Call(
            run="r", group="g", execution="e", index=0, attempt=0, call="c0", turn=0, request_digest="0", parent=None,
            prefix_tokens=0, prompt_ids=prompt.tokens, sampled_ids=tuple(sampled), logprobs=(0.0,) * len(sampled),
            versions=(), temperature=1.0, finish_reason="stop", text=text, hosts=("h",),
            history_digest=extend(prompt.digest, answer(text)),
        )
    )  # fmt: skip
    return history, text


@given(st.lists(texts, min_size=1, max_size=4), ids)
def test_a_prompt_never_has_fewer_tokens_than_are_known_before(contents: list[str], sampled: list[int]) -> None:
    """Law, also where turns of the model stand in the ids that it sampled."""
    asked = [{"role": "user", "content": content} for content in contents]
    history, text = said(sampled, asked)
    for messages in (asked, [*asked, answer(text), *asked], [*asked[1:], answer(text), *asked]):
        ask = Ask(api="chat", digest="d", messages=messages)
        assert fewest_tokens(ask, TOKENIZER) <= len(prompt_of(ask, history, TOKENIZER).tokens)
    for content in contents:
        ask = Ask(api="completions", digest="d", text=content)
        assert fewest_tokens(ask, TOKENIZER) <= len(prompt_of(ask, History(), TOKENIZER).tokens)


def test_the_longest_token_bounds_a_text_closely() -> None:
    longest = max(range(10, TOKENIZER.vocab_size), key=lambda token: len(TOKENIZER.decode([token])))
    text = "x" + TOKENIZER.decode([longest])
    assert TOKENIZER.longest_token == len(text) - 1 > 1
    assert fewest_tokens(Ask(api="completions", digest="d", text=text), TOKENIZER) == 2
    assert fewest_tokens(Ask(api="completions", digest="d", tokens=(1, 2, 3)), TOKENIZER) == 3


@given(st.lists(texts, max_size=6).map("<|end|>".join))
def test_a_long_text_is_the_same_tokens(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "LONG", 0)
        long = TOKENIZER.encode(text)
    assert long == TOKENIZER.encode(text)


def test_a_snapshot_of_a_history_stays_as_it_was() -> None:
    asked = [{"role": "user", "content": "one"}]
    history, text = said([20, 21], asked)
    before = history.snapshot()
    assert before == history
    more, _ = said([22], [*asked, answer(text), *asked])
    history.take(more.calls[0])
    assert before == said([20, 21], asked)[0]
    assert before != history
