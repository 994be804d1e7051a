"""Claude Code sessions: JSON lines, one a content block or message, linked by `parentUuid`. Pure.

Rows of one `message.id` are one call. A call that used several tools at once has a result row for each, and each names
another block's row as its parent: these are one continuation, not forks. A call's prompt is its parent call's prompt
and answer, and the rows between. A rewind is a second row with the same parent; a compaction boundary begins a history
anew; a sidechain (in the file, or in `agent-ID.jsonl` beside it) is a sub-agent's own history.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opengyre.formats.exchange import usage_of
from opengyre.formats.messages import blocks_of
from opengyre.formats.model import LogCall, Message, Notes, Source, message
from opengyre.formats.values import decoded, obj, seq, string

TALK = frozenset({"user", "assistant", "system", "attachment"})
SYNTHETIC = "<synthetic>"


@dataclass(slots=True)
class _Row:
    """An entry of the session: a user's row, a marker, or all rows of one answer."""

    place: int
    kind: str
    parent: str | None
    blocks: list[tuple[str, str]] = field(default_factory=list)
    call: str = ""
    """Identifier of the answer; empty for what is none."""
    uses: set[str] = field(default_factory=set)
    """Tools that the answer called."""
    answers: set[str] = field(default_factory=set)
    """Tool calls whose results the row brings, where it brings nothing else."""
    boundary: bool = False
    synthetic: bool = False
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    """Rows of one file by their uuid; rows of one answer share an entry."""

    agent: str
    rows: dict[str, _Row] = field(default_factory=dict)
    answers: dict[str, _Row] = field(default_factory=dict)
    results: dict[int, list[_Row]] = field(default_factory=dict)
    """Place of an answer -> its tools' result rows, in order."""
    agents: dict[str, None] = field(default_factory=dict)
    """Sub-agents that it names."""


def claude_code(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of a session and of the sub-agents whose files lie beside it."""
    session = _read(source, "", notes)
    yield from _calls(session, "", notes)
    seen: set[str] = set()
    queue = list(session.agents)
    while queue:
        name = queue.pop(0)
        if name in seen:
            continue
        seen.add(name)
        data = source.beside(f"agent-{name}.jsonl")
        if data is None:
            notes.warn(f"sub-agent agent-{name}.jsonl is not beside the file and was left out")
            continue
        side = _read(Source(f"agent-{name}.jsonl", data).mended(), name, notes)
        yield from _calls(side, f"{name}/", notes)
        queue += side.agents


def _read(source: Source, agent: str, notes: Notes) -> _Session:
    session = _Session(agent)
    for number, line in source.lines():
        entry = decoded(line)
        if not isinstance(entry, dict):
            notes.unreadable(line)
            continue
        kind, uuid = string(entry.get("type")), string(entry.get("uuid"))
        if kind not in TALK or not uuid:
            notes.ignored[kind or "untyped"] += 1
        elif uuid not in session.rows:
            _add(session, uuid, kind, entry, number)
    for row in session.rows.values():
        parent = session.rows.get(row.parent or "")
        if row.answers and parent is not None and row.answers <= parent.uses:
            session.results.setdefault(parent.place, []).append(row)
    return session


def _add(session: _Session, uuid: str, kind: str, entry: dict[str, Any], place: int) -> None:
    body = obj(entry.get("message"))
    parent = string(entry.get("parentUuid")) or None
    if string(obj(entry.get("toolUseResult")).get("agentId")):
        session.agents[entry["toolUseResult"]["agentId"]] = None
    content = body.get("content")
    if kind == "assistant":
        name = string(body.get("id")) or uuid
        known = session.answers.get(name)
        if known is None:
            known = session.answers[name] = _Row(place, kind, parent, call=name)
            known.synthetic = body.get("model") == SYNTHETIC
        known.usage = usage_of(body) or known.usage
        known.blocks += blocks_of(content)
        known.uses |= {string(obj(one).get("id")) for one in seq(content) if obj(one).get("type") == "tool_use"}
        session.rows[uuid] = known
        return
    row = session.rows[uuid] = _Row(place, kind, parent)
    if kind == "system":
        row.boundary = entry.get("subtype") == "compact_boundary"
    elif kind == "user":
        row.blocks = blocks_of(content)
        parts = [obj(one) for one in seq(content)]
        if parts and all(one.get("type") == "tool_result" for one in parts):
            row.answers = {string(one.get("tool_use_id")) for one in parts}


def _calls(session: _Session, prefix: str, notes: Notes) -> Iterator[LogCall]:
    known: set[str] = set()
    for row in session.answers.values():
        if row.synthetic:
            notes.ignored["synthetic_answer"] += 1
            continue
        parent, between, boundary, side = _way_up(session, row)
        agent = session.agent or ("main" if not side else f"sidechain-{side}")
        missing = parent is not None and parent.call not in known
        known.add(row.call)
        answer = message("assistant", row.blocks)
        _continuity(notes, row, parent)
        yield LogCall(
            call=prefix + row.call,
            parent=prefix + parent.call if parent is not None else None,
            prompt=tuple(between),
            answer=(answer,),
            agent=agent,
            after_compaction=boundary,
            refused="parent_missing" if missing else None,
            usage=row.usage,
        )


def _way_up(session: _Session, row: _Row) -> tuple[_Row | None, list[Message], bool, int]:
    """The call that `row` goes on from, the messages between in order, whether a compaction lies between, and where
    the history begins, if the row's history begins with no call."""
    found: list[Message] = []
    seen: set[int] = set()
    name = row.parent
    while name is not None and (at := session.rows.get(name)) is not None and at.place not in seen:
        seen.add(at.place)
        if at.call and not at.synthetic and at is not row:
            return at, found[::-1], False, 0
        if at.boundary:
            return None, found[::-1], True, 0
        above = session.rows.get(at.parent or "")
        if at.answers and above is not None and at in session.results.get(above.place, ()):
            # All results that were there when the call was made, not only the one that its row names.
            there = [one for one in session.results[above.place] if one.place < row.place]
            found += [message("user", one.blocks) for one in reversed(there)]
        elif at.kind == "user" and at.blocks:
            found.append(message("user", at.blocks))
        name = at.parent
    return None, found[::-1], False, 0


def _continuity(notes: Notes, row: _Row, parent: _Row | None) -> None:
    """Whether the cache grew by exactly what the parent call wrote: then the log's history is the API's."""
    names = ("cache_read", "cache_creation")
    if parent is None or any(name not in one.usage for name in names for one in (row, parent)):
        return
    fact = notes.facts.setdefault("cache_continuity", {"of": 0, "holds": 0})
    fact["of"] += 1
    fact["holds"] += row.usage["cache_read"] == parent.usage["cache_read"] + parent.usage["cache_creation"]
