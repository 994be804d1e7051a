"""Token in, token out: prompts extend recorded calls by ids, and the log alone is enough to know them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.traj import Call
from opengyre.rollout.history import History
from opengyre.rollout.messages import answer, chain, extend
from opengyre.rollout.prompt import build
from opengyre.tiny.tokenizer import TinyTokenizer

TOKENIZER = TinyTokenizer.train(["echo one two three", "cat a.txt", "done"], 280)
END = TOKENIZER.end_id

texts = st.text("abc .", min_size=1, max_size=8)
sampled = st.lists(st.integers(10, TOKENIZER.vocab_size - 1), min_size=1, max_size=6)


def record(number: int, history: History, messages: list[dict], ids: list[int]) -> Call:
    """Ask and record, as the recorder does."""
    prompt = build(messages, history, TOKENIZER)
    text = TOKENIZER.completion_text(ids)
    call = Call(
        run="r", group="g", execution="e", index=number, attempt=0, call=f"c{number}", turn=number,
        request_digest=str(number), parent=prompt.parent, prefix_tokens=prompt.prefix,
        prompt_ids=prompt.tokens[prompt.prefix :], sampled_ids=tuple(ids), logprobs=(0.0,) * len(ids), versions=(),
        temperature=1.0, finish_reason="stop", text=text, hosts=("h",),
        history_digest=extend(prompt.digest, answer(text)),
    )  # fmt: skip
    history.take(call)
    return call


@given(st.lists(st.tuples(sampled, st.booleans(), texts), min_size=1, max_size=6), st.integers(0, 5))
def test_a_conversation_is_its_sampled_ids_and_what_is_new(turns: list[tuple[list[int], bool, str]], cut: int) -> None:
    """Law: the prompt equals the template over the whole conversation with the sampled ids in place, whatever was
    sampled; and a writer that took over at `cut` asks with the same ids."""
    messages: list[dict] = [{"role": "user", "content": "do it"}]
    as_ids: list[dict] = list(messages)
    history = History()
    for number, (ids, closed, seen) in enumerate(turns):
        ids = [token for token in ids if token != END] + ([END] if closed else [])
        if number == cut:
            history = History.of(history.calls)
        prompt = build(messages, history, TOKENIZER)
        assert list(prompt.tokens) == TOKENIZER.render(as_ids)
        call = record(number, history, messages, ids)
        assert call.parent == (None if number == 0 else f"c{number - 1}")
        assert history.tokens(call) == [*prompt.tokens, *ids]
        messages += [answer(call.text), {"role": "tool", "content": seen}]
        as_ids += [{"role": "assistant", "token_ids": ids}, {"role": "tool", "content": seen}]


def test_a_branch_takes_its_parents_tokens_up_to_where_it_leaves() -> None:
    history = History()
    messages: list[dict] = [{"role": "user", "content": "do it"}]
    first = record(0, history, messages, [20, 21, END])
    more = [*messages, answer(first.text)]
    left = record(1, history, [*more, {"role": "tool", "content": "a"}], [22, END])
    right = record(2, history, [*more, {"role": "tool", "content": "b"}], [23, END])
    assert left.parent == right.parent == first.call
    assert history.tokens(right)[: right.prefix_tokens] == history.tokens(first)
    assert history.answered("1") is left
    assert history.answered("9") is None


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ({"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}, True),
        ({"role": "user", "content": "x"}, {"role": "user", "content": " x\n", "name": "n"}, True),
        ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x", "refusal": None}, True),
        ({"role": "user", "content": "x"}, {"role": "tool", "content": "x"}, False),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "y"}, False),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "2", "function": {"name": "f"}}]},
            False,
        ),
    ],
)
def test_what_makes_messages_the_same(one: dict, two: dict, same: bool) -> None:
    assert (chain([one]) == chain([two])) is same
    assert chain([one, two])[0] == chain([one])[0]
    assert chain([two, one])[1] != chain([one])[0]
