"""Request logs and HAR files of the OpenAI and Anthropic APIs, whole and streamed."""

import base64
import json
from typing import Any

import pytest

from opengyre.formats import Forest, Source, TreeReport, read_tree

ASK = {"role": "user", "content": "go"}
TOOL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}


def read(rows: list[Any]) -> TreeReport:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return read_tree(Source("log", data), Forest(), per_call=True)


def chat(messages: list[Any], answer: Any, name: str = "", **request: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": answer, "finish_reason": "stop"}
    return {"request": {"messages": messages, **request}, "response": {"id": name, "choices": [choice]}}


def sse(*events: Any) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_a_conversation_with_a_tool_is_one_path() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [TOOL], "refusal": None}
    # The client sends the call back under another identifier, its content as a list: the model is shown the same.
    back = {"role": "assistant", "content": [], "tool_calls": [{**TOOL, "id": "c9"}]}
    result = {"role": "tool", "tool_call_id": "c9", "content": "a.py"}
    found = read([chat([ASK], call), chat([ASK, back, result], {"role": "assistant", "content": "done"})])
    assert (found.format, found.leaves, found.transitions) == ("requests", 1, {"extend": 1})
    assert found.facts["apis"] == {"openai-chat": 2}


def test_a_tool_call_in_other_bytes_is_a_fork() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    other = {**TOOL, "function": {"name": "ls", "arguments": '{"path":"."}'}}
    back = {"role": "assistant", "content": None, "tool_calls": [other]}
    found = read([chat([ASK], call), chat([ASK, back], {"role": "assistant", "content": "done"})])
    assert "extend" not in found.transitions


def test_marks_for_the_server_are_no_part_of_the_prompt() -> None:
    tool = {"name": "ls", "input_schema": {"type": "object"}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    marked = [{"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]}]
    rows = [
        {"request": {"tools": [{**tool, "cache_control": {"type": "ephemeral"}}], "messages": marked},
         "response": {"type": "message", "id": "m1", **said}},
        {"request": {"tools": [tool], "messages": [ASK, {"id": "m1", **said}, ASK]},
         "response": {"type": "message", "id": "m2", **said}},
    ]  # fmt: skip
    assert read(rows).transitions == {"extend": 1}


def test_other_tools_are_another_prompt() -> None:
    answer = {"role": "assistant", "content": "x"}
    one, two = ({"type": "function", "function": {"name": name}} for name in ("a", "b"))
    found = read([chat([ASK], answer, tools=[one]), chat([ASK, answer, ASK], answer, tools=[two])])
    assert found.unique_nodes == 3 + 5


def test_results_in_another_order_fork_at_the_first_result() -> None:
    """oh-my-pi #11179: the order of parallel results is part of the prompt."""
    calls = {"role": "assistant", "content": "both", "tool_calls": [TOOL, {**TOOL, "id": "c2"}]}
    one, two = ({"role": "tool", "tool_call_id": name, "content": name} for name in ("first", "second"))
    answer = {"role": "assistant", "content": "x"}
    found = read([chat([ASK], calls), chat([ASK, calls, one, two], answer), chat([ASK, calls, two, one], answer)])
    assert found.unique_nodes == 2 + 3 + 3


def test_a_line_that_came_twice_is_one_call() -> None:
    row = chat([ASK], {"role": "assistant", "content": "x"}, "id-1")
    assert read([row, row]).calls == 1


def test_sessions_are_executions_of_their_own() -> None:
    answer = {"role": "assistant", "content": "x"}
    rows = [{**chat([ASK], answer, f"id-{name}"), "session_id": name} for name in "ab"]
    found = read(rows)
    assert (found.executions, found.transitions, found.refused.count, found.unique_nodes) == (2, {}, 0, 2)


def test_several_answers_are_several_calls() -> None:
    row = chat([ASK], {"role": "assistant", "content": "x"})
    row["response"]["choices"].append({"index": 1, "message": {"role": "assistant", "content": "y"}})
    found = read([row])
    assert (found.calls, found.leaves, found.unique_nodes, found.refused.count) == (2, 2, 3, 0)


def test_token_ids_of_a_server_make_a_tree_of_tokens() -> None:
    row = chat([ASK], {"role": "assistant", "content": "x"})
    row["response"]["prompt_token_ids"] = [1, 2, 3]
    row["response"]["choices"][0] |= {"token_ids": [4, 5], "logprobs": {"content": [{"logprob": -1}, {"logprob": -2}]}}
    found = read([row])
    assert (found.unit, found.events, found.unique_nodes, found.refused.count) == ("tokens", 2, 5, 0)


def test_completions_with_a_prompt_of_ids() -> None:
    choice = {"index": 0, "text": "x", "token_ids": [9], "logprobs": {"token_logprobs": [-0.5]}}
    row = {"request": {"prompt": [7, 8]}, "response": {"choices": [choice]}}
    found = read([row])
    assert (found.unit, found.unique_nodes, found.facts["apis"]) == ("tokens", 3, {"openai-completions": 1})


def test_anthropic_whole_and_streamed_are_the_same() -> None:
    ask = {"system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}], "messages": [ASK]}
    content = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1", "name": "ls", "input": {"p": 1}}]
    whole = {"id": "m1", "type": "message", "role": "assistant", "content": content, "usage": {"input_tokens": 3}}
    stream = sse(
        {"type": "message_start", "message": {"id": "m2", "role": "assistant", "usage": {"input_tokens": 3}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "look."}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "ls", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"p": '}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    )
    after = [ASK, {"role": "assistant", "content": content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}]}]}]  # fmt: skip
    done = {"id": "m3", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "done"}]}
    rows = [
        {"request": {"body": ask}, "response": {"status_code": 200, "body": json.dumps(whole)}},
        {"request": ask, "response": stream},
        {"request": {"system": "S", "messages": after}, "response": done},
    ]
    found = read(rows)
    assert found.facts["apis"] == {"anthropic-messages": 3}
    assert found.transitions == {"retry": 1, "extend": 1}
    assert found.unique_nodes == 5


def test_a_streamed_chat_with_tools() -> None:
    def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
        return {"id": "s1", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}

    function = {"name": "ls", "arguments": '{"path": '}
    stream = sse(
        delta(role="assistant", content="I "),
        delta(content="look."),
        delta(tool_calls=[{"index": 0, "id": "c1", "function": function}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '"."}'}}]),
        delta("tool_calls"),
    )
    answer = {"role": "assistant", "content": "I look.", "tool_calls": [TOOL]}
    rows = [{"request": {"messages": [ASK]}, "response": stream}, chat([ASK, answer, ASK], {"content": "done"})]
    found = read(rows)
    assert (found.transitions, found.leaves) == ({"extend": 1}, 1)


def test_responses_that_name_the_one_before() -> None:
    def row(name: str, given: Any, text: str, **more: Any) -> dict[str, Any]:
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
        return {"request": {"input": given, **more}, "response": {"id": name, "output": output}}

    found = read([row("r1", "go", "one"), row("r2", "on", "two", previous_response_id="r1")])
    assert (found.transitions, found.unique_nodes) == ({"extend": 1}, 4)


CUT = sse(
    {"type": "message_start", "message": {"id": "m", "role": "assistant"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I "}},
)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"request": {"messages": [ASK]}, "response": {"error": {"message": "no"}}}, "failed_request"),
        ({"request": {"messages": [ASK]}, "response": {"status": 529, "body": "{}"}}, "failed_request"),
        ({"request": {"messages": [ASK]}, "response": 'data: {"choices": [{"delta": {}}]}\n\n'}, "incomplete_answer"),
        ({"request": {"messages": [ASK]}, "response": CUT}, "incomplete_answer"),
        ({"request": {"messages": [ASK]}, "response": {"weather": "fine"}}, "unknown_answer"),
        ({"request": None, "response": {"choices": [{}]}}, "no_request"),
    ],
)
def test_exchanges_that_are_no_calls_are_refused(row: dict[str, Any], reason: str) -> None:
    assert read([row]).refused.reasons == {reason: 1}


def test_har() -> None:
    def entry(url: str, asked: Any, given: str, **content: Any) -> dict[str, Any]:
        request = {"method": "POST", "url": url, "postData": {"text": json.dumps(asked)}}
        return {"request": request, "response": {"status": 200, "content": {"text": given, **content}}}

    answer = {"role": "assistant", "content": "done"}
    body = json.dumps(chat([ASK], answer)["response"])
    stream = sse({"id": "s", "choices": [{"index": 0, "delta": {"content": "done"}, "finish_reason": "stop"}]})
    encoded = base64.b64encode(stream.encode()).decode()
    url = "https://api.example/v1/chat/completions?beta=true"
    log = {
        "log": {
            "entries": [
                entry(url, {"messages": [ASK]}, body),
                entry(url, {"messages": [ASK, answer, ASK]}, encoded, encoding="base64"),
                entry("https://api.example/telemetry", {}, "{}"),
            ]
        }
    }
    found = read_tree(Source("x.har", json.dumps(log, indent=1).encode()), Forest())
    assert (found.format, found.transitions, found.ignored) == ("har", {"extend": 1}, {"other_request": 1})


def test_a_broken_line_is_a_warning() -> None:
    data = json.dumps(chat([ASK], {"role": "assistant", "content": "x"})).encode() + b'\n{"request": {"mess'
    found = read_tree(Source("log", data), Forest())
    assert (found.calls, found.warnings) == (1, ("a line is no JSON object",))


def test_the_harness_tells_whose_call_it_is() -> None:
    main = {"system": "You are Claude Code, Anthropic's official CLI for Claude.", "messages": [ASK]}
    helper = {"system": "You are an agent for Claude Code.", "messages": [{"role": "user", "content": "look"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "x"}]}
    agent = {"User-Agent": "claude-cli/2.0"}
    rows = [{"request": {"headers": agent, "body": body}, "response": answer} for body in (main, helper)]
    found = read(rows)
    assert found.roles == {"main": 1, "sub-agent": 1}
    assert found.transitions == {"branch": 1}


def test_where_no_profile_tells_the_shape_does() -> None:
    answer = {"role": "assistant", "content": "x"}
    other = [{"role": "system", "content": "Other"}, {"role": "user", "content": "look"}]
    found = read([chat([ASK], answer), chat(other, answer), chat([ASK, answer, ASK], answer)])
    assert [row.role for row in found.per_call] == ["main", "sub-agent", "main"]
