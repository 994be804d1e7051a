"""NeMo-Gym rollouts: one line (or document) an execution, its Responses-API output with token ids. Pure.

The last item of each model call carries `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; the
prompt is given whole. A rollout without any such item is read as messages.
"""

from collections.abc import Iterator
from typing import Any

from opengyre.formats.messages import preamble, response_input, response_item
from opengyre.formats.model import LogCall, Message, Notes, Source
from opengyre.formats.values import FormatError, decode, decoded, floats, number, obj, string, token_ids

GENERATED = frozenset({"message", "reasoning", "function_call"})


def nemo_gym(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of every rollout in the file."""
    row = 0
    for rollout in _rollouts(source, notes):
        yield from _rollout(rollout, row)
        row += 1
    notes.facts["rollouts"] = row


def _rollouts(source: Source, notes: Notes) -> Iterator[dict[str, Any]]:
    first = next(source.lines(), None)
    if first is None or decoded(first[1]) is None:  # one document over many lines
        document = decode(source.data)
        yield from (obj(one) for one in (document if isinstance(document, list) else [document]))
        return
    for _, line in source.lines():
        row = decoded(line)
        if isinstance(row, dict):
            yield row
        else:
            notes.warn("a line is no JSON object")


def response_in(row: dict[str, Any]) -> dict[str, Any] | None:
    """The Responses-API answer of a rollout; None where there is none."""
    for value in (row.get("response"), row.get("input"), row):
        if isinstance(obj(value).get("output"), list):
            return obj(value)
    return None


def _rollout(row: dict[str, Any], place: int) -> Iterator[LogCall]:
    response = response_in(row)
    if response is None:
        raise FormatError(f"rollout {place} has no response with an output list")
    task = number(row.get("_ng_task_index"))
    group = f"task-{task}" if task is not None else None
    execution = f"rollout-{place}"
    asked = obj(row.get("responses_create_params"))
    items = [obj(item) for item in response["output"]]
    if not any("generation_token_ids" in item for item in items):
        yield from _as_messages(asked, items, execution, group)
        return
    for index, item in enumerate(items):
        if "generation_token_ids" not in item:
            continue
        prompt, sampled = token_ids(item.get("prompt_token_ids")), token_ids(item["generation_token_ids"])
        bad = prompt is None or sampled is None
        yield LogCall(
            call=f"item-{index}",
            execution=execution,
            group=group,
            prompt_ids=prompt,
            sampled_ids=sampled,
            logprobs=floats(item.get("generation_log_probs")),
            refused="token_id" if bad else None,
        )


def _as_messages(
    asked: dict[str, Any], items: list[dict[str, Any]], execution: str, group: str | None
) -> Iterator[LogCall]:
    before = preamble(asked.get("instructions"), asked.get("tools"))
    history: list[Message] = [*before, *response_input(asked.get("input"))]
    answer: list[Message] = []
    calls = 0
    for item in [*items, {"type": "end"}]:
        if (string(item.get("type")) or "message") in GENERATED and item.get("role", "assistant") == "assistant":
            answer.append(response_item(item))
            continue
        if answer:
            yield LogCall(
                call=f"call-{calls}", execution=execution, group=group, prompt=tuple(history), answer=tuple(answer)
            )
            history += answer
            calls, answer = calls + 1, []
        history.append(response_item(item))
