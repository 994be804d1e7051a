"""Logs of other agents: what each oddity of a format becomes in the tree."""

import json
import zipfile
from io import BytesIO
from typing import Any

import pytest

from opengyre.formats import Forest, FormatError, Source, TreeReport, detect, read_tree
from support.trajectory_logs import FIXTURES, report, source


def read(rows: list[Any], name: str | None = None, forest: Forest | None = None) -> TreeReport:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return read_tree(Source("log", data), forest or Forest(), name, per_call=True)


def kinds(found: TreeReport) -> list[str]:
    return [row.transition for row in found.per_call]


def test_every_small_log_is_known_by_its_content() -> None:
    expected = {
        "agent-e7.jsonl": "claude-code", "claude_main.jsonl": "claude-code", "claude_parallel.jsonl": "claude-code",
        "claude_rewind.jsonl": "claude-code", "codex_rollout.jsonl": "codex", "inspect_spans.json": "inspect",
        "nemo_empty.jsonl": "nemo-gym", "nemo_group.jsonl": "nemo-gym", "nemo_think_strip.json": "nemo-gym",
        "run.trajectory.json": "atif", "run.trajectory.cont-1.json": "atif", "swe_elided.traj": "swe-agent",
    }  # fmt: skip
    assert {path.name: detect(source(path)) for path in FIXTURES.iterdir()} == expected


def test_nemo_gym_think_strip() -> None:
    found = report("nemo_think_strip.json")
    assert (found.events, found.path_tokens, found.unique_nodes, found.leaves) == (13, 31, 26, 2)
    assert found.per_call[1].offset == 5


def test_nemo_gym_samples_share_nodes_not_events() -> None:
    found = report("nemo_group.jsonl")
    assert (found.executions, found.events, found.path_tokens, found.unique_nodes) == (4, 12, 52, 19)


def test_nemo_gym_empty_ids() -> None:
    found = report("nemo_empty.jsonl")
    assert (found.calls, found.refused.count, found.refused.reasons) == (4, 4, {"empty_completion": 4})


def test_nemo_gym_without_ids_is_read_as_messages() -> None:
    output = [
        {"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
    ]
    found = read([{"responses_create_params": {"input": "go"}, "response": {"output": output}}])
    assert (found.unit, found.calls, kinds(found)) == ("messages", 2, ["root", "extend"])


@pytest.mark.parametrize(
    ("logprobs", "reason"), [([-0.1], "logprobs_length"), ([-0.1, 0.5], "logprobs_value"), (None, "no_logprobs")]
)
def test_calls_without_sound_logprobs_are_refused_and_stay_context(logprobs: Any, reason: str) -> None:
    item = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": logprobs}
    found = read([{"responses_create_params": {}, "response": {"output": [item]}}])
    assert found.refused.reasons == {reason: 1}
    assert found.unique_nodes == 4


@pytest.mark.parametrize("bad", [[-1], [2**31], [1.5], ["x"], [True]])
def test_ids_that_are_no_tokens_are_refused(bad: list[Any]) -> None:
    item = {"prompt_token_ids": [1], "generation_token_ids": bad, "generation_log_probs": [-0.1]}
    found = read([{"responses_create_params": {}, "response": {"output": [item]}}])
    assert found.refused.reasons == {"token_id": 1}


def test_swe_agent_elided_output() -> None:
    assert kinds(report("swe_elided.traj")) == ["root", "extend", "fork", "fork", "fork"]


def test_swe_agent_query_is_the_prompt() -> None:
    ask = [{"role": "user", "content": "go"}]
    steps = [
        {"query": ask, "response": "one", "action": "ls"},
        {"query": [*ask, {"role": "assistant", "content": "one"}, {"role": "user", "content": "x"}], "response": "two"},
        {"response": "three"},
    ]
    found = read([{"trajectory": steps}])
    assert kinds(found) == ["root", "extend"]
    assert found.refused.reasons == {"no_prompt": 1}


def test_claude_code_parallel_results_are_no_forks() -> None:
    found = report("claude_parallel.jsonl")
    assert (found.leaves, found.transitions) == (1, {"extend": 2})
    assert found.per_call[1].offset == 2
    assert found.per_call[1].length == 5  # Question, answer, both results, answer.
    assert found.facts["cache_continuity"] == {"of": 2, "holds": 2}


def test_claude_code_rewind_and_compaction() -> None:
    found = report("claude_rewind.jsonl")
    assert found.leaf_kinds == {"abandoned": 1, "compacted": 1, "final": 1}
    assert kinds(found) == ["root", "extend", "fork", "compaction"]
    assert found.per_call[-1].length == 3  # Of the history before, the summary only.


def test_claude_code_sub_agents_in_side_files() -> None:
    found = report("claude_main.jsonl")
    assert found.agents == {"e7": 2, "main": 3}
    assert found.transitions == {"branch": 1, "extend": 3}
    assert found.warnings == ("sub-agent agent-gone.jsonl is not beside the file and was left out",)
    assert found.ignored == {"synthetic_answer": 1}


def test_claude_code_resumed_copies_of_rows_are_one_call() -> None:
    rows = [json.loads(line) for line in (FIXTURES / "claude_rewind.jsonl").read_text().splitlines()]
    assert read([*rows, *rows]).calls == 4


def test_atif_copied_steps_and_absent_files() -> None:
    found = report("run.trajectory.json")
    assert (found.calls, found.ignored, found.transitions) == (3, {"copied_step": 1}, {"compaction": 1, "extend": 1})
    assert found.warnings == ("sub-agent trajectory.summary.json is not beside the file and was left out",)
    assert report("run.trajectory.cont-1.json").calls == 1


def test_atif_references_in_a_circle_end() -> None:
    step = {"step_id": 1, "source": "user", "message": "x"}
    document = {"schema_version": "ATIF-v1.7", "steps": [step, {**step, "source": "agent"}]}
    document["continued_trajectory_ref"] = "b.json"
    data = json.dumps(document).encode()
    found = read_tree(Source("a.json", data, lambda _name: data), Forest())
    assert found.calls == 2


def test_atif_with_token_ids_is_a_tree_of_tokens() -> None:
    metrics = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    steps = [{"step_id": 1, "source": "agent", "message": "x", "metrics": metrics}]
    found = read([{"schema_version": "ATIF-v1.8", "steps": steps}])
    assert (found.unit, found.events, found.unique_nodes) == ("tokens", 1, 3)


def test_inspect_agents_rerolls_and_attachments() -> None:
    found = report("inspect_spans.json")
    assert found.agents == {"helper": 1, "main": 4}
    assert found.transitions == {"branch": 1, "extend": 1, "retry": 1}
    assert found.refused.reasons == {"no_prompt": 1, "superseded": 1}
    # The attachment stands for its text: where one prompt has the text itself, it is the same prompt.
    text = "A long text, kept once.".join((FIXTURES / "inspect_spans.json").read_text().rsplit("attachment://abc", 1))
    assert read_tree(Source("log", text.encode()), Forest()).unique_nodes == found.unique_nodes


def test_inspect_archive() -> None:
    document = json.loads((FIXTURES / "inspect_spans.json").read_text())
    memory = BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "{}")
        archive.writestr("samples/one_epoch_1.json", json.dumps(document["samples"][0]))
    found = read_tree(Source("log.eval", memory.getvalue()), Forest())
    assert (found.format, found.calls, found.events) == ("inspect", 5, 4)


def test_codex_rollback_and_compaction() -> None:
    found = report("codex_rollout.jsonl")
    assert kinds(found) == ["root", "extend", "extend", "fork", "compaction"]
    assert found.per_call[0].events == 3  # One answer: its thought and two calls.
    assert found.leaf_kinds == {"abandoned": 1, "compacted": 1, "final": 1}


def test_a_history_without_its_thoughts_is_told_apart_from_an_edit() -> None:
    ask = {"role": "user", "content": "go"}
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    plain = {"role": "assistant", "content": "yes"}
    rows = [
        {"request": {"messages": [ask]}, "response": {"choices": [{"message": answer}]}},
        {"request": {"messages": [ask, plain, ask]}, "response": {"choices": [{"message": plain}]}},
    ]
    found = read(rows)
    assert (found.transitions, found.diagnoses) == ({"realign": 1}, {"template": 1})


def test_a_tokenizer_makes_a_tree_of_tokens() -> None:
    encode = lambda text: [ord(char) for char in text]  # noqa: E731 - a tokenizer of one line
    messages, tokens = report("claude_rewind.jsonl"), report("claude_rewind.jsonl", Forest(encode=encode))
    assert tokens.unit == "tokens"
    assert tokens.leaves == messages.leaves == 3
    assert [row.transition for row in tokens.per_call] == [row.transition for row in messages.per_call]
    first = tokens.per_call[0]
    assert first.length == len("<|im_start|>user\nPlan<|im_end|>\n<|im_start|>assistant\nPlanned<|im_end|>\n")
    assert first.events == len("Planned<|im_end|>\n")


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_tokens_and_messages_tell_the_same_transitions(name: str) -> None:
    messages = report(name)
    tokens = report(name, Forest(encode=lambda text: [ord(char) for char in text]))
    assert tokens.transitions == messages.transitions
    assert (tokens.leaves, tokens.leaf_kinds) == (messages.leaves, messages.leaf_kinds)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "it is empty"),
        (b"\x00\x01\x02", "it is no JSON"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b'{"trajectory": [1, 2', "it is no JSON"),
        (b'{"x": 1}', "its format is not known"),
        (b'{"log": {"entries": []}}', "it has no model call of the format har"),
        (b"PK\x03\x04rubbish", "its archive cannot be read"),
        (b'{"a": "\xff\xfe"}', "its format is not known"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence) as raised:
        read_tree(Source("log", data), Forest())
    assert "\n" not in str(raised.value)


SPOILT = (
    b'{"request": {"messages": [{"role": "user", "content": "%s"}]}, '
    b'"response": {"id": "%s", "choices": [{"message": {"role": "assistant", "content": "x"}}]}}\n'
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\ud83d\ud83d\ude00 \ude00", "\ufffd\U0001f600 \ufffd"),
        (rb"\ud83d\n \\ud83d", "\ufffd\n \\ud83d"),
    ],
)
def test_a_lone_surrogate_loses_no_line(text: bytes, shown: str) -> None:
    source = Source("log", SPOILT % (text, b"a") + SPOILT % (b"whole", b"b"))
    found = read_tree(source, Forest())
    assert (found.calls, found.warnings) == (2, ())
    first = next(iter(source.mended().lines()))[1]
    assert json.loads(first)["request"]["messages"][0]["content"] == shown


def test_pairs_and_escaped_backslashes_stay_as_they_are() -> None:
    data = SPOILT % (rb"\ud83d\uDE00 \\ud83d \\\\ude00", b"a")
    assert Source("log", data).mended().data == data


@pytest.mark.parametrize(
    "data",
    [
        SPOILT % (b"go", b"a"),
        b'{\n"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}]\n}',
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_log(data: bytes) -> None:
    found = read_tree(Source("log", b"\xef\xbb\xbf" + data), Forest())
    assert (found.calls, found.warnings) == (1, ())


def test_a_file_in_latin_1_says_that_it_is_not_utf_8() -> None:
    line = SPOILT % ("é".encode("latin-1"), b"a")
    with pytest.raises(FormatError, match=r"^it is not UTF-8$"):
        read_tree(Source("log", line), Forest())
    with pytest.raises(FormatError, match=r"^it is not UTF-8$"):
        read_tree(Source("log", b'{\n"messages": [{"role": "user", "content": "\xe9"}]}'), Forest())
    found = read_tree(Source("log", line + SPOILT % (b"go", b"b")), Forest())
    assert (found.calls, found.warnings) == (1, ("a line is not UTF-8",))
