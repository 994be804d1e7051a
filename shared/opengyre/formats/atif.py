"""ATIF trajectories (Agent Trajectory Interchange Format, Harbor's RFC 1), versions 1.0 to 1.8. Pure.

A step of the agent is a call whose prompt is everything before it; what it observed follows its answer. A copied step
(`is_copied_context`) is history, not a call, so that it is trained once, where it was sampled. After a compaction that
replaced the history the next step begins anew. Sub-agents and continuations are read where they are embedded or lie
beside; a file that is absent is a warning. Steps are read leniently: a log is worth reading even where a field is new.
"""

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

from opengyre.formats.messages import blocks_of
from opengyre.formats.model import LogCall, Message, Notes, Source, message
from opengyre.formats.values import (
    FormatError,
    compact,
    decode,
    decoded,
    floats,
    mended,
    number,
    obj,
    seq,
    string,
    token_ids,
)

MAX_FILES = 256
"""Files that one trajectory may refer to, so that references in a circle end."""
PARTS = frozenset({"image", "audio"})


def atif(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of a trajectory with its sub-agents and continuations; of each, where the file has one a line."""
    first = next(source.lines(), (0, b""))[1]
    if isinstance(obj(decoded(first)).get("steps"), list):
        for number, line in source.lines():
            document = obj(decode(line))
            name = string(document.get("trajectory_id")) or f"line-{number}"
            for call in _document(document, source, notes):
                yield dataclasses.replace(call, execution=name)
    else:
        yield from _document(obj(decode(source.data)), source, notes)


def _document(document: dict[str, Any], source: Source, notes: Notes) -> Iterator[LogCall]:
    if not isinstance(document.get("steps"), list):
        raise FormatError("steps is missing; an ATIF document has a list of steps")
    notes.facts["schema_version"] = string(document.get("schema_version"))
    queue: list[tuple[dict[str, Any], str, str, bool]] = [(document, "main", "", False)]
    seen: set[str] = {source.name}
    while queue:
        trajectory, agent, prefix, compacted = queue.pop(0)
        compacted = yield from _steps(trajectory, agent, prefix, compacted, notes)
        for one in seq(trajectory.get("subagent_trajectories")):
            name = string(obj(one).get("trajectory_id")) or f"sub-agent-{len(queue)}"
            queue.append((obj(one), name, f"{prefix}{name}/", False))
        for name, what, sub in _references(trajectory):
            if name in seen or len(seen) >= MAX_FILES:
                continue
            seen.add(name)
            found = decoded(mended(source.beside(name) or b""))
            if isinstance(obj(found).get("steps"), list):
                queue.append((obj(found), name if sub else agent, f"{name}/", compacted and not sub))
            else:
                notes.warn(f"{what} {name} is not beside the file and was left out")


def _references(trajectory: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for step in seq(trajectory.get("steps")):
        for result in seq(obj(obj(step).get("observation")).get("results")):
            for reference in seq(obj(result).get("subagent_trajectory_ref")):
                path = string(obj(reference).get("trajectory_path"))
                if path:
                    yield path, "sub-agent", True
    if following := string(trajectory.get("continued_trajectory_ref")):
        yield following, "continuation", False


def _steps(
    trajectory: dict[str, Any], agent: str, prefix: str, compacted: bool, notes: Notes
) -> Generator[LogCall, None, bool]:
    """Returns whether a compaction came last, after which a continuation begins."""
    tools = seq(obj(trajectory.get("agent")).get("tool_definitions"))
    history: list[Message] = [message("tools", [("other", compact(tools))])] if tools else []
    for place, entry in enumerate(seq(trajectory.get("steps")), 1):
        step = obj(entry)
        source, name = string(step.get("source")), f"{prefix}step-{number(step.get('step_id')) or place}"
        if source != "agent":
            if obj(obj(step.get("extra")).get("context_management")).get("boundary") == "replace":
                history, compacted = [], True
            history += _content(source or "user", step.get("message"))
            history += _observed(step)
            continue
        answer = _answer(step)
        if step.get("is_copied_context") is True:
            notes.ignored["copied_step"] += 1
        elif step.get("llm_call_count") == 0:
            notes.ignored["step_without_a_model"] += 1
        else:
            yield _call(step, name, agent, tuple(history), answer, after_compaction=compacted)
            compacted = False
        history += [answer, *_observed(step)]
    return compacted


def _call(
    step: dict[str, Any], name: str, agent: str, prompt: tuple[Message, ...], answer: Message, *, after_compaction: bool
) -> LogCall:
    metrics = obj(step.get("metrics"))
    asked, given = token_ids(metrics.get("prompt_token_ids")), token_ids(metrics.get("completion_token_ids"))
    counts = {"input": "prompt_tokens", "output": "completion_tokens", "cache_read": "cached_tokens"}
    usage = {ours: value for ours, theirs in counts.items() if (value := number(metrics.get(theirs))) is not None}
    return LogCall(
        call=name,
        agent=agent,
        prompt=prompt,
        answer=(answer,),
        prompt_ids=asked if given is not None else None,
        sampled_ids=given if asked is not None else None,
        logprobs=floats(metrics.get("logprobs")),
        after_compaction=after_compaction,
        usage=usage,
    )


def _answer(step: dict[str, Any]) -> Message:
    calls = [
        ("call", compact([string(obj(call).get("function_name")), obj(call).get("arguments")]))
        for call in seq(step.get("tool_calls"))
    ]
    thought = ("reasoning", string(step.get("reasoning_content")))
    return message("assistant", [thought, *blocks_of(step.get("message")), *calls])


def _content(role: str, content: Any) -> list[Message]:
    return [message(role, blocks_of(content))] if content else []


def _observed(step: dict[str, Any]) -> list[Message]:
    results = seq(obj(step.get("observation")).get("results"))
    contents = [obj(result).get("content") for result in results]
    return [
        message("tool", [("result", text) if kind == "text" else (kind, text) for kind, text in blocks_of(content)])
        for content in contents
        if content
    ]
