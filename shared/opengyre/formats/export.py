"""Our own executions in forms that others read: ATIF documents and rows of a table. Pure.

What an execution's log holds is kept: every call with its token ids, log-probs and the versions that sampled it, tools
and verdict. ATIF is linear, so its steps stand in the order of the log, and a call that goes on from another than the
one before says so in `extra`. Whole prompts grow with the square of the length; beyond `MAX_PROMPT_TOKENS` a document
has each prompt's new ids in `extra` instead.
"""

import datetime
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from opengyre.formats.values import compact, decoded
from opengyre.proto.base import Event
from opengyre.proto.traj import Call, Ended, Forked, Part, Started, ToolResult, TrajEvent, Verified
from opengyre.trees import Builder, Given, Tree

SCHEMA = "ATIF-v1.7"
"""The release that documents are written in: readers of later ones take it."""
MAX_PROMPT_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event and when it was stored, seconds since the epoch."""

    time: float
    event: Event


@dataclass(frozen=True, slots=True)
class _Log:
    started: Started | None
    calls: tuple[tuple[float, Call], ...]
    tools: dict[tuple[int | None, int], ToolResult]
    """Lane (None: the trunk), turn along it -> its command."""
    turns: dict[str, int]
    """Call of a lane -> its turn along the lane, from the execution's begin; others have it themselves."""
    verified: Verified | None
    """Of an execution without lanes."""
    lanes: tuple[Verified, ...]
    """Of each lane."""
    ended: Ended | None


def _sorted(log: Iterable[Recorded]) -> _Log:
    """Each event once, by its place in the execution's log."""
    events: dict[tuple[int, int], tuple[float, TrajEvent]] = {}
    for one in log:
        if isinstance(one.event, TrajEvent):
            events.setdefault((one.event.index, one.event.attempt), (one.time, one.event))
    ordered = [events[place] for place in sorted(events)]
    last: dict[type, TrajEvent] = {type(event): event for _, event in ordered}
    started, verified, ended = last.get(Started), last.get(Verified), last.get(Ended)
    calls = tuple((time, event) for time, event in ordered if isinstance(event, Call))
    forked = next((event.turn for _, event in ordered if isinstance(event, Forked)), 0)
    said: Counter[int] = Counter()
    turns: dict[str, int] = {}
    for _, call in calls:
        if call.lane is not None:
            turns[call.call] = forked + said[call.lane]
            said[call.lane] += 1
    verdicts = [event for _, event in ordered if isinstance(event, Verified) and event.lane is not None]
    return _Log(
        started=started if isinstance(started, Started) else None,
        calls=calls,
        tools={(event.lane, event.turn): event for _, event in ordered if isinstance(event, ToolResult)},
        turns=turns,
        verified=verified if isinstance(verified, Verified) and not verdicts else None,
        lanes=tuple(sorted(verdicts, key=lambda event: event.lane or 0)),
        ended=ended if isinstance(ended, Ended) else None,
    )


def score(parts: Sequence[Part]) -> float | None:
    """Weighted mean of a verifier's parts; None where nothing was verified."""
    total = math.fsum(part.weight for part in parts)
    return math.fsum(part.weight * part.value for part in parts) / total if total > 0 else None


def _tree(calls: Iterable[Call]) -> Tree:
    builder = Builder()
    for order, call in enumerate(calls):
        builder.add(Given(call.call, call.prompt_ids, call.sampled_ids, call.parent, call.prefix_tokens, order))
    return builder.tree()


def atif_document(execution: str, log: Iterable[Recorded], version: str) -> dict[str, Any]:
    """An execution as an ATIF document; `version` is this release's."""
    known = _sorted(log)
    tree = _tree(call for _, call in known.calls)
    lengths = {node.call: node.start.depth for node in tree.nodes}
    whole = sum(lengths.values()) <= MAX_PROMPT_TOKENS
    prompts = {node.call: tree.tokens(node)[: node.start.depth].tolist() for node in tree.nodes} if whole else {}
    steps = _opening(known.started)
    before: str | None = None
    for place, (time, call) in enumerate(known.calls):
        follows = place + 1 == len(known.calls) or known.calls[place + 1][1].turn != call.turn
        tool = known.tools.get((call.lane, known.turns.get(call.call, call.turn))) if follows else None
        steps.append(_step(call, time, tool, lengths.get(call.call), prompts.get(call.call), before))
        before = call.call
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    calls = [call for _, call in known.calls]
    dispatch = known.started.dispatch if known.started is not None else None
    return {
        "schema_version": SCHEMA,
        "session_id": calls[0].group if calls else None,
        "trajectory_id": execution,
        "agent": {
            "name": f"opengyre-{dispatch.harness.agent}" if dispatch is not None else "opengyre",
            "version": version,
            "model_name": dispatch.run if dispatch is not None else None,
        },
        "steps": steps,
        "notes": None if whole else "prompt_token_ids are left out; extra.new_prompt_token_ids are what a call added",
        "final_metrics": {
            "total_prompt_tokens": sum(lengths.values()),
            "total_completion_tokens": sum(len(call.sampled_ids) for call in calls),
            "total_steps": len(steps),
        },
        "extra": _facts(known),
    }


def _facts(known: _Log) -> dict[str, Any]:
    dispatch = known.started.dispatch if known.started is not None else None
    parts = known.verified.parts if known.verified is not None else ()
    lanes = [{"lane": one.lane, **_verdict(one)} for one in known.lanes]
    scores = [one["verified_score"] for one in lanes if one["verified_score"] is not None]
    whole = math.fsum(scores) / len(scores) if scores else None
    return {
        "run": dispatch.run if dispatch is not None else None,
        "group": dispatch.group if dispatch is not None else None,
        "task": dispatch.task.task if dispatch is not None else None,
        "version": dispatch.version if dispatch is not None else None,
        "end_reason": known.ended.reason if known.ended is not None else None,
        "verified_score": whole if lanes else score(parts),
        "infra_error": known.verified.infra_error if known.verified is not None else None,
        "parts": msgspec.to_builtins(parts),
        **({"lanes": lanes} if lanes else {}),
    }


def _verdict(verified: Verified) -> dict[str, Any]:
    """Of a lane."""
    failed = verified.infra_error is not None or verified.reason == "infra"
    return {
        "end_reason": verified.reason,
        "verified_score": None if failed else score(verified.parts),
        "infra_error": verified.infra_error,
        "parts": msgspec.to_builtins(verified.parts),
    }


def _opening(started: Started | None) -> list[dict[str, Any]]:
    if started is None:
        return []
    harness, task = started.dispatch.harness, started.dispatch.task
    system = [{"source": "system", "message": harness.system}] if harness.system else []
    return [*system, {"source": "user", "message": task.instruction}]


def _step(
    call: Call, time: float, tool: ToolResult | None, prompt: int | None, ids: list[int] | None, before: str | None
) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "completion_tokens": len(call.sampled_ids),
        "completion_token_ids": list(call.sampled_ids),
        "logprobs": list(call.logprobs),
    }
    if prompt is not None:
        metrics["prompt_tokens"] = prompt
    if ids is not None:
        metrics["prompt_token_ids"] = ids
    extra: dict[str, Any] = {
        "call": call.call,
        "turn": call.turn,
        "versions": msgspec.to_builtins(call.versions),
        "temperature": call.temperature,
        "finish_reason": call.finish_reason,
        "hosts": list(call.hosts),
        "duration_s": call.duration_s,
    }
    if call.lane is not None:
        extra["lane"] = call.lane
    if call.parent != before:
        extra["parent"] = call.parent
    if ids is None:
        extra |= {"prefix_tokens": call.prefix_tokens, "new_prompt_token_ids": list(call.prompt_ids)}
    step: dict[str, Any] = {
        "timestamp": datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(),
        "source": "agent",
        "message": call.text if call.content is None else call.content,
        "llm_call_count": 1,
        "metrics": metrics,
        "extra": extra,
    }
    if tool is not None:
        step["tool_calls"] = [
            {"tool_call_id": tool.exec_id, "function_name": "shell", "arguments": {"command": tool.command}}
        ]
        facts = {"exit_code": tool.exit_code, "timed_out": tool.timed_out, "output_bytes": tool.output_bytes}
        step["observation"] = {"results": [{"source_call_id": tool.exec_id, "content": tool.output, "extra": facts}]}
    elif call.tool_calls:
        step["tool_calls"] = [
            {"tool_call_id": one.id, "function_name": one.name, "arguments": _arguments(one.arguments)}
            for one in call.tool_calls
        ]
    return step


def _arguments(text: str) -> dict[str, Any]:
    """ATIF wants an object; whatever else was sampled is kept as it is."""
    value = decoded(text)
    return value if isinstance(value, dict) else {"raw": text}


def rows(execution: str, log: Iterable[Recorded]) -> list[dict[str, Any]]:
    """An execution as rows of a table, one a call; columns as in `COLUMNS`. A lane's calls have the verdict on it."""
    known = _sorted(log)
    facts = _facts(known)
    whole = {"parts": facts.pop("parts")}
    verdicts: dict[int | None, dict[str, Any]] = {one.pop("lane"): one for one in facts.pop("lanes", [])}
    return [
        {
            **facts,
            **(verdict := verdicts.get(call.lane, whole)),
            "parts": compact(verdict["parts"]),
            "execution": execution,
            "lane": call.lane,
            "call": call.call,
            "index": call.index,
            "turn": call.turn,
            "parent": call.parent,
            "prefix_tokens": call.prefix_tokens,
            "prompt_ids": list(call.prompt_ids),
            "sampled_ids": list(call.sampled_ids),
            "logprobs": list(call.logprobs),
            "versions": list(
                itertools.chain.from_iterable([span.version] * (span.end - span.start) for span in call.versions)
            ),
            "temperature": call.temperature,
            "finish_reason": call.finish_reason,
            "text": call.text,
            "hosts": list(call.hosts),
            "duration_s": call.duration_s,
            "parked_s": call.parked_s,
            "time": time,
        }
        for time, call in known.calls
    ]


COLUMNS = {
    "run": "string", "group": "string", "execution": "string", "task": "string", "version": "int64",
    "end_reason": "string", "verified_score": "float64", "infra_error": "string", "parts": "string",
    "lane": "int64", "call": "string", "index": "int64", "turn": "int64", "parent": "string", "prefix_tokens": "int64",
    "prompt_ids": "list<int32>", "sampled_ids": "list<int32>", "logprobs": "list<float64>", "versions": "list<int64>",
    "temperature": "float64", "finish_reason": "string", "text": "string", "hosts": "list<string>",
    "duration_s": "float64", "parked_s": "float64", "time": "float64",
}  # fmt: skip
"""Column -> its type. `version` is the group's at admission, `versions` the one that sampled each token, `prompt_ids`
what follows `prefix_tokens` of the parent, `time` when it was stored, seconds since the epoch."""
