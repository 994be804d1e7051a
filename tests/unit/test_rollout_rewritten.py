"""Histories that harnesses rewrite: each is served, and placed at the exact token where it leaves what was recorded."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proto.traj import Call, ToolCall, VersionSpan
from opengyre.rollout.ask import ApiError, Ask
from opengyre.rollout.history import History, message_of, shared
from opengyre.rollout.messages import chain, extend, tools_digest
from opengyre.rollout.openai import parse
from opengyre.rollout.prompt import Prompt, prompt_of
from opengyre.rollout.router import Completion
from opengyre.rollout.stops import before, cut
from opengyre.tiny.tokenizer import TinyTokenizer
from opengyre.tiny.tools import Said, read

TOKENIZER = TinyTokenizer.train(["echo one two three", "cat a.txt", "done", "add"], 300)
END = TOKENIZER.end_id
ADD = {"name": "add", "description": "", "parameters": {"properties": {"a": {}}, "required": ["a"]}}
BASH = {"name": "bash", "description": "", "parameters": {"properties": {"command": {"type": "string"}}}}
TASK = {"role": "user", "content": "do it"}


def said(text: str) -> tuple[int, ...]:
    """Ids of a turn, one a byte: never what encoding the text would give."""
    return (*(TOKENIZER.encode(letter)[0] for letter in text), END)


def ask(messages: list[Any], *tools: Any) -> Ask:
    return Ask(api="chat", digest="d", messages=messages, tools=tools)


def answered(history: History, request: Ask, text: str) -> tuple[Call, dict[str, Any]]:
    """Record the answer to a request, as the recorder does."""
    prompt = prompt_of(request, history, TOKENIZER)
    number, ids = len(history.calls), said(text)
    turn = TOKENIZER.read_turn(TOKENIZER.completion_text(ids), request.tools)
    calls = tuple(ToolCall(id=f"k{number}{n}", name=name, arguments=a) for n, (name, a) in enumerate(turn.calls))
    call = Call(
        run="r", group="g", execution="e", index=number, attempt=0, call=f"c{number}", turn=number,
        request_digest=str(number), parent=prompt.parent, prefix_tokens=prompt.prefix,
        prompt_ids=prompt.tokens[prompt.prefix :], sampled_ids=ids, logprobs=(0.0,) * len(ids), versions=(),
        temperature=1.0, finish_reason="stop", text=text, hosts=("h",), content=turn.content if calls else None,
        tool_calls=calls, transition=prompt.transition,
    )  # fmt: skip
    message = message_of(call)
    call = msgspec.structs.replace(call, history_digest=extend(prompt.digest, message))
    history.take(call)
    return call, message


def placed(history: History, prompt: Prompt) -> None:
    """Law: parent and prefix are exact, and no recorded call shares more."""
    longest = max(shared(tuple(history.tokens(call)), prompt.tokens) for call in history.calls)
    assert prompt.prefix == longest
    parent = next(call for call in history.calls if call.call == prompt.parent)
    assert history.tokens(parent)[: prompt.prefix] == list(prompt.tokens[: prompt.prefix])


@pytest.fixture
def talk() -> tuple[History, list[Any]]:
    history, messages = History(), [TASK]
    for text, seen in (("echo one", "one"), ("cat a.txt", "two")):
        _, message = answered(history, ask(messages), text)
        messages += [message, {"role": "tool", "content": seen}]
    return history, messages


def test_a_history_told_otherwise_in_form_is_put_back_in_its_own_tokens(talk: tuple[History, list[Any]]) -> None:
    """The role that a harness gives to a system message changes no token, but every digest after it."""
    history, _ = History(), None
    first, message = answered(history, ask([{"role": "system", "content": "s"}, TASK]), "echo one")
    prompt = prompt_of(
        ask([{"role": "developer", "content": "s"}, TASK, message, {"role": "tool", "content": "x"}]),
        history,
        TOKENIZER,
    )
    assert (prompt.parent, prompt.transition, prompt.prefix) == (first.call, "realign", len(history.tokens(first)))
    placed(history, prompt)


def test_an_edited_tool_result_forks_where_it_was_edited(talk: tuple[History, list[Any]]) -> None:
    history, messages = talk
    edited = [*messages[:2], {"role": "tool", "content": "[elided]"}, *messages[3:]]
    prompt = prompt_of(ask(edited), history, TOKENIZER)
    placed(history, prompt)
    first = history.calls[0]
    assert prompt.transition == "fork"
    assert prompt.prefix >= len(history.tokens(first)), "the first turn is kept in its own ids"
    own = list(history.calls[1].sampled_ids)
    assert any(list(prompt.tokens[at : at + len(own)]) == own for at in range(len(prompt.tokens))), "so is the second"


def test_a_turn_whose_beginning_was_stripped_forks_inside_or_before_it(talk: tuple[History, list[Any]]) -> None:
    history, messages = talk
    stripped = [*messages[:3], {"role": "assistant", "content": "a.txt"}, messages[4]]
    prompt = prompt_of(ask(stripped), history, TOKENIZER)
    placed(history, prompt)
    assert (prompt.transition, prompt.parent) == ("fork", "c1")


def test_a_compacted_history_still_works(talk: tuple[History, list[Any]]) -> None:
    history, messages = talk
    prompt = prompt_of(ask([TASK, {"role": "user", "content": "summary: all well"}, *messages[3:]]), history, TOKENIZER)
    placed(history, prompt)
    assert prompt.transition == "fork"


def test_a_sub_agent_is_a_branch(talk: tuple[History, list[Any]]) -> None:
    history, _ = talk
    prompt = prompt_of(ask([{"role": "user", "content": "look for b"}]), history, TOKENIZER)
    placed(history, prompt)
    assert prompt.transition == "branch"


def test_other_tools_are_another_prompt(talk: tuple[History, list[Any]]) -> None:
    """Messages alone do not tell: the tools are in the tokens."""
    history, messages = talk
    prompt = prompt_of(ask(messages, ADD), history, TOKENIZER)
    placed(history, prompt)
    assert prompt.transition == "fork"
    assert prompt_of(ask(messages, BASH), history, TOKENIZER).transition == "extend", "of this one nothing is said"


@pytest.mark.parametrize("rewrite", [json.dumps, lambda value: json.dumps(value, indent=1, sort_keys=True)])
def test_a_tool_call_keeps_its_bytes_by_its_id(rewrite: Any) -> None:
    history = History()
    text = '<tool_call>{"name": "add", "arguments": {"b":2.0,  "a": "\\u00e9"}}</tool_call>'
    first, message = answered(history, ask([TASK], ADD), text)
    assert first.tool_calls[0].arguments == '{"b":2.0,  "a": "\\u00e9"}'
    [call] = message["tool_calls"]
    again = {**call, "function": {"name": "add", "arguments": rewrite({"b": 2, "a": "é"})}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
    prompt = prompt_of(ask([TASK, {**message, "tool_calls": [again]}, result], ADD), history, TOKENIZER)
    assert (prompt.parent, prompt.transition) == (first.call, "extend")
    other = {**call, "id": "new", "function": {"name": "add", "arguments": rewrite({"b": 2, "a": "é"})}}
    prompt = prompt_of(ask([TASK, {**message, "tool_calls": [other]}, result], ADD), history, TOKENIZER)
    assert prompt.transition == "realign", "another id: the turn is found by what it says"
    edited = {**call, "function": {"name": "add", "arguments": rewrite({"b": 3, "a": "é"})}}
    prompt = prompt_of(ask([TASK, {**message, "tool_calls": [edited]}, result], ADD), history, TOKENIZER)
    assert (prompt.parent, prompt.transition) == (first.call, "fork")


@given(st.lists(st.sampled_from(["echo one", "cat a.txt", "done", "x"]), min_size=1, max_size=5), st.data())
def test_any_selection_of_a_history_is_placed_exactly(texts: list[str], data: Any) -> None:
    """Law: whatever a harness leaves out or repeats, parent and prefix are the longest that there are."""
    history, messages = History(), [TASK]
    for text in texts:
        _, message = answered(history, ask(messages), text)
        messages += [message, {"role": "tool", "content": "seen"}]
    chosen = data.draw(st.lists(st.sampled_from(messages), min_size=1, max_size=6))
    prompt = prompt_of(ask(chosen), history, TOKENIZER)
    assert prompt.prefix <= len(prompt.tokens)
    if prompt.transition != "extend":
        placed(history, prompt)
    again = History.of(history.calls)
    assert prompt_of(ask(chosen), again, TOKENIZER) == prompt


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_shared_is_the_longest_common_beginning(one: list[int], other: list[int]) -> None:
    count = shared(tuple(one), tuple(other))
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


def test_a_stop_string_ends_a_completion_at_its_token() -> None:
    ids = TOKENIZER.encode("echo one > a.txt")
    done = Completion(tuple(ids), (-0.5,) * len(ids), (VersionSpan(version=1, start=0, end=len(ids)),), "length")
    kept, stop = cut(done, (" > ", "zzz"), TOKENIZER.decode)
    assert stop == " > "
    text = TOKENIZER.decode(kept.tokens)
    assert " > " in text
    assert " > " not in TOKENIZER.decode(kept.tokens[:-1])
    assert before(text, stop) == "echo one"
    assert len(kept.logprobs) == len(kept.tokens) == kept.versions[-1].end
    assert kept.finish == "stop"
    assert cut(done, ("zzz",), TOKENIZER.decode) == (done, None)


@pytest.mark.parametrize(
    ("text", "tools", "result"),
    [
        ("ls", (BASH,), Said("", (("bash", '{"command": "ls"}'),))),
        ("done", (BASH,), Said("done")),
        ("ls", (), Said("ls")),
        ("ls", (ADD,), Said("ls")),
        ('so <tool_call>{"name": "f"}</tool_call>', (BASH,), Said("so", (("f", "{}"),))),
        ("<tool_call>{oops</tool_call>", (ADD,), Said("<tool_call>{oops</tool_call>")),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', (ADD,), None),
    ],
)
def test_what_of_a_turn_is_a_call(text: str, tools: tuple[Any, ...], result: Said | None) -> None:
    assert read(text, tools) == (result or Said(text))


def test_token_ids_come_from_the_log_alone() -> None:
    body = {"messages": [TASK, {"role": "assistant", "content": "x", "token_ids": [1, 2]}, TASK]}
    request = parse(json.dumps(body).encode())
    assert all("token_ids" not in message for message in request.messages)
    assert chain(request.messages) == chain([TASK, {"role": "assistant", "content": "x"}, TASK])
    assert tools_digest("") == ""


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_a_request_or_refused(value: Any) -> None:
    for body in ({"messages": value}, {"messages": [TASK], "tools": value}, {"messages": [TASK], "stop": value}, value):
        try:
            request = parse(json.dumps(body).encode("utf-8", "surrogatepass"))
            prompt_of(request, History(), TOKENIZER)
        except (ApiError, ValueError):
            continue
