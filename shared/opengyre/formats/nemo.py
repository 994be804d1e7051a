"""NeMo-Gym rollouts: one line (or document) an execution, its Responses-API output with token ids. Pure.

The last item of each model call carries `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; the
prompt is given whole, so a rollout is read item by item. One without any such item is read as messages.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from opengyre.formats.messages import preamble, response_input, response_item
from opengyre.formats.model import LogCall, Message, Notes, Source
from opengyre.formats.values import MAX_TOKEN, FormatError, decode, decoded, number, obj, string

GENERATED = frozenset({"message", "reasoning", "function_call"})
IDS = b'"generation_token_ids"'


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


class _Rollout(msgspec.Struct):
    """What of a line or document is looked at."""

    responses_create_params: msgspec.Raw = msgspec.Raw(b"null")
    response: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")
    output: list[msgspec.Raw] | None = None
    task: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="_ng_task_index")


class _Item(msgspec.Struct):
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float] | None = None


_item = msgspec.json.Decoder(_Item)
_rollout_of = msgspec.json.Decoder(_Rollout)
_output_of = msgspec.json.Decoder(_Output)
FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def nemo_gym(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of every rollout in the file."""
    count = 0
    for text in _rollouts(source, notes):
        yield from _rollout(text, count)
        count += 1
    notes.facts["rollouts"] = count


def _rollouts(source: Source, notes: Notes) -> Iterator[Any]:
    first = next(source.lines(), None)
    if first is None or not _is_object(first[1]):  # one document over many lines, or a list of them
        document = decode(source.data)
        yield from (msgspec.json.encode(one) for one in (document if isinstance(document, list) else [document]))
        return
    for _, line in source.lines():
        if _is_object(line):
            yield line
        else:
            notes.unreadable(line)


def _is_object(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=_Empty)
    except FAULTS:
        return False
    return True


class _Empty(msgspec.Struct):
    """Any object: nothing of it is looked at."""


def _items(rollout: _Rollout) -> list[msgspec.Raw] | None:
    for raw in (rollout.response, rollout.input):
        try:
            return _output_of.decode(raw).output
        except FAULTS:
            continue
    return rollout.output


def _rollout(text: Any, place: int) -> Iterator[LogCall]:
    try:
        rollout = _rollout_of.decode(text)
    except FAULTS as error:
        raise FormatError(f"rollout {place} is none of NeMo-Gym: {error}") from error
    items = _items(rollout)
    if items is None:
        raise FormatError(f"rollout {place} has no response with an output list")
    task = number(decoded(rollout.task))
    group = f"task-{task}" if task is not None else None
    execution = f"rollout-{place}"
    if any(IDS in bytes(raw) for raw in items):
        for index, raw in enumerate(items):
            if IDS in bytes(raw):
                yield _call(raw, f"item-{index}", execution, group)
    else:
        asked = obj(decoded(rollout.responses_create_params))
        yield from _as_messages(asked, [obj(decoded(raw)) for raw in items], execution, group)


def _call(raw: msgspec.Raw, name: str, execution: str, group: str | None) -> LogCall:
    try:
        item = _item.decode(raw)
        prompt, sampled = _ids(item.prompt_token_ids), _ids(item.generation_token_ids)
    except (*FAULTS, OverflowError, ValueError):
        return LogCall(call=name, execution=execution, group=group, refused="token_id")
    return LogCall(
        call=name,
        execution=execution,
        group=group,
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=item.generation_log_probs,
    )


def _ids(values: list[int]) -> Any:
    """As an array, `[n]` int32; raises `ValueError` for what is no id."""
    wide = np.asarray(values, np.int64)
    if len(wide) and not 0 <= int(wide.min()) <= int(wide.max()) < MAX_TOKEN:
        raise ValueError("token ids are not in [0, 2**31)")
    return wide.astype(np.int32)


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
