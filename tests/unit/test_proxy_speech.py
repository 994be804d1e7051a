"""What a stream says before its answer is whole, and how answers are read: laws over any tokens, in any increments."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opengyre.proto.traj import Call, ToolCall, VersionSpan
from opengyre.rollout.ask import ApiError, Ask
from opengyre.rollout.reading import Answer, ends_of, read
from opengyre.rollout.router import Completion
from opengyre.rollout.speech import Speech, Text, Watch, content_of
from opengyre.tiny.tokenizer import TinyTokenizer
from support.proxy import TOOLS

TEXTS = ["write one into a.txt", "echo one > a.txt", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>']
TOKENIZER = TinyTokenizer.train(TEXTS, 320)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PIECES = ["one", " two ", "\n", "STOP", "ST", "é", "日本", "🙂", "<tool", "_call>", CALL, "</tool_call>", "done", " "]
STOPS = [(), ("STOP",), ("STOP", "ne S"), ("本",), ("P two",)]
CHOICES = ["none", "add", "both", "any", "named", "single"]

said_tokens = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=8).map(lambda parts: TOKENIZER.encode("".join(parts))),
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1).filter(lambda token: token != TOKENIZER.end_id), max_size=40),
)


def ask_of(kind: str, stops: tuple[str, ...], api: str = "chat") -> Ask:
    names = {"none": (), "both": ("bash", "add")}.get(kind, ("add",))
    tools = tuple(TOOLS[name] for name in names)
    choice = {"any": "", "named": "add"}.get(kind)
    return Ask(api=api, digest="x", tools=tools, stops=stops, choice=choice, parallel=kind != "single")  # type: ignore[arg-type]  # a literal, checked at run time


def whole_of(tokens: Sequence[int], finish: str) -> Completion:
    ids = (*tokens, TOKENIZER.end_id) if finish == "stop" else tuple(tokens)
    spans = (VersionSpan(version=0, start=0, end=len(ids)),) if ids else ()
    return Completion(tokens=ids, logprobs=(-0.5,) * len(ids), versions=spans, finish=finish)  # type: ignore[arg-type]  # as above


def call_of(answer: Answer, api: str = "chat") -> Call:
    return Call(
        run="r", group="g", execution="e", index=0, attempt=0, call="c0000", turn=0, request_digest="x", parent=None,
        prefix_tokens=0, prompt_ids=(), sampled_ids=answer.kept.tokens, logprobs=answer.kept.logprobs, versions=(),
        temperature=1.0, finish_reason="stop", text=answer.text, hosts=(), content=answer.content,
        api=api,  # type: ignore[arg-type]  # a literal, checked at run time
        tool_calls=tuple(ToolCall(id="i", name=name, arguments=text) for name, text in answer.calls),
    )  # fmt: skip


@given(
    said_tokens,
    st.lists(st.integers(1, 6), max_size=12),
    st.sampled_from(CHOICES),
    st.sampled_from(STOPS),
    st.sampled_from(["stop", "length"]),
    st.sampled_from(["chat", "completions", "messages"]),
)
@example(TOKENIZER.encode("one " + CALL + " two " + CALL), [1] * 12, "add", (), "stop", "chat")
@example(TOKENIZER.encode(" one STOP two"), [1] * 12, "none", ("STOP",), "length", "messages")
@example(TOKENIZER.encode("🙂🙂"), [1] * 12, "none", (), "stop", "chat")
@example(TOKENIZER.encode("one </tool_call> two"), [], "single", (), "stop", "chat")
@example(TOKENIZER.encode("one </tool_call> two"), [1] * 12, "single", (), "stop", "chat")
def test_a_stream_in_any_increments_says_the_recorded_answer(
    tokens: list[int], cuts: list[int], kind: str, stops: tuple[str, ...], finish: str, api: str
) -> None:
    ask = ask_of("none" if api == "completions" else kind, stops, api)
    whole = whole_of(tokens, finish)
    opening = TOKENIZER.opening(ask.tools, ask.choice) if ask.choice is not None else []
    call = call_of(read(ask, whole, opening, TOKENIZER), api)
    speech = Speech(ask, TOKENIZER, opening)
    said, at = "", 0
    for size in [*cuts, len(whole.tokens)]:
        said += speech.take(whole.tokens[at : at + size])
        assert content_of(call).startswith(said)
        at += size
    assert said + speech.rest(call) == content_of(call)


@given(said_tokens, st.lists(st.integers(1, 6), max_size=12))
def test_the_text_of_increments_is_that_of_the_whole(tokens: list[int], cuts: list[int]) -> None:
    text, at = Text(TOKENIZER.decode), 0
    for size in [*cuts, len(tokens)]:
        text.take(tokens[at : at + size])
        at += size
    whole = TOKENIZER.decode(tokens)
    assert whole.startswith(text.text)
    assert whole.endswith("�") or whole == text.text


def test_what_is_sure_is_said_at_once() -> None:
    speech = Speech(ask_of("add", ("STOP",)), TOKENIZER)
    said = [speech.take([token]) for token in TOKENIZER.encode(" one two\nthree <tool")]
    assert "".join(said) == "one two\nthree"
    assert len([part for part in said if part]) > 5


def test_a_record_that_is_not_what_was_said_is_an_error() -> None:
    speech = Speech(ask_of("none", ()), TOKENIZER)
    speech.take(TOKENIZER.encode("one two"))
    with pytest.raises(ApiError):
        speech.rest(call_of(Answer(whole_of([], "stop"), None, "one", None, ())))


@given(said_tokens, st.lists(st.integers(1, 6), max_size=12), st.sampled_from(STOPS), st.booleans())
def test_a_call_is_over_when_nothing_more_of_it_is_kept(
    tokens: list[int], cuts: list[int], stops: tuple[str, ...], single: bool
) -> None:
    """Law: what is sampled after `over` is not in the record."""
    ask = ask_of("single" if single else "none", stops)
    watch, at = Watch(ends_of(ask, TOKENIZER), TOKENIZER.decode), 0
    for size in [*cuts, len(tokens)]:
        over = watch.over(tokens[at : at + size])
        at += size
        if over:
            break
    else:
        at = 0
    answer = read(ask, whole_of(tokens, "stop"), (), TOKENIZER)
    if at:
        assert len(answer.kept.tokens) <= min(at, len(tokens))
    elif not TOKENIZER.decode(tokens).endswith("�"):
        assert not any(stop in TOKENIZER.decode(tokens) for stop in ends_of(ask, TOKENIZER))


def test_one_tool_call_only_where_no_more_are_wished() -> None:
    tokens = TOKENIZER.encode(f"so {CALL} and {CALL} more")
    several = read(ask_of("add", ()), whole_of(tokens, "stop"), (), TOKENIZER)
    single = read(ask_of("single", ()), whole_of(tokens, "stop"), (), TOKENIZER)
    assert len(several.calls) == 2
    assert single.calls == several.calls[:1]
    assert single.content == "so"
    assert TOKENIZER.decode(single.kept.tokens) == f"so {CALL}"
    assert (single.stop, single.kept.finish) == (None, "stop")


@pytest.mark.parametrize("kind", ["any", "named"])
def test_a_forced_call_begins_for_the_policy(kind: str) -> None:
    ask = ask_of(kind, ())
    opening = TOKENIZER.opening(ask.tools, ask.choice or "")
    assert TOKENIZER.decode(opening) == ' <tool_call>{"name": "add", "arguments": '
    done = whole_of(TOKENIZER.encode('{"a": 1,  "b": 2}}</tool_call>'), "stop")
    answer = read(ask, done, opening, TOKENIZER)
    assert answer.calls == (("add", '{"a": 1,  "b": 2}'),)
    assert answer.content == ""
    assert answer.text.startswith("<tool_call>")


def test_a_forced_shell_tool_takes_the_turn_as_it_is() -> None:
    ask = Ask(api="chat", digest="x", tools=(TOOLS["bash"], TOOLS["add"]), choice="bash")
    assert TOKENIZER.opening(ask.tools, "bash") == []
    for text in ("echo one", "done", "", CALL):
        answer = read(ask, whole_of(TOKENIZER.encode(text), "stop"), (), TOKENIZER)
        [(name, arguments)] = answer.calls
        assert (name, json.loads(arguments)) == ("bash", {"command": text})


def test_a_forced_tool_that_is_not_the_shell_is_never_answered_by_the_shell() -> None:
    ask = Ask(api="chat", digest="x", tools=(TOOLS["bash"], TOOLS["add"]), choice="add")
    opening = TOKENIZER.opening(ask.tools, "add")
    assert read(ask, whole_of(TOKENIZER.encode("echo one"), "stop"), opening, TOKENIZER).calls == ()
