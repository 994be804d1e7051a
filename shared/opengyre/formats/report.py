"""What a log amounts to: the figures of its trees, and what became of each call. Pure."""

from collections import Counter
from typing import Any

import msgspec

from opengyre.formats.detect import READERS, detect
from opengyre.formats.forest import Forest
from opengyre.formats.model import LINE_NOT_UTF8, Notes, Source
from opengyre.formats.values import NOT_UTF8, FormatError
from opengyre.trees import Node, Role, Tree, Trie, structural
from opengyre.trees.trie import ROOT


class Refused(msgspec.Struct, frozen=True):
    """Calls that cannot be trained."""

    count: int
    reasons: dict[str, int]
    """Reason -> calls."""


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call."""

    execution: str
    call: str
    agent: str
    role: str
    transition: str
    """`root`, or how it stands to the call before it."""
    related: str | None
    """The call that it goes on from or shares most with."""
    offset: int
    """How much it shares with that call, in units."""
    diagnosis: str | None
    events: int
    length: int
    """Prompt and answer, in units."""
    refused: str | None


class TreeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `gyre trajectory tree` prints."""

    file: str
    format: str
    unit: str
    """What the figures count: `tokens`, or `messages` where the log has no tokens."""
    executions: int
    calls: int
    events: int
    """What was sampled, each call's."""
    path_tokens: int
    """Prompts and answers without sharing."""
    unique_nodes: int
    """At distinct prefixes, over all executions."""
    leaves: int
    leaf_kinds: dict[str, int]
    """`final`: the last word of an agent; `compacted`: a summary followed; `abandoned`: the history was rewritten or
    taken back; `retried`: the same prompt was asked again."""
    refused: Refused
    transitions: dict[str, int]
    """Class -> calls; the first of an execution is none."""
    diagnoses: dict[str, int]
    """Why histories diverge -> calls."""
    dedup_ratio: float
    agents: dict[str, int]
    """Agent -> its calls, where the log names agents."""
    roles: dict[str, int]
    """Role -> calls, as the log, the harness's profile or the shape of the tree tells it."""
    ignored: dict[str, int]
    """Kind of entry -> how many have no part in the tree."""
    warnings: tuple[str, ...]
    facts: dict[str, Any]
    """What only this format tells."""
    per_call: tuple[CallRow, ...] = ()


def read_tree(source: Source, forest: Forest, format_name: str | None = None, *, per_call: bool = False) -> TreeReport:
    """Read a log into `forest` and tell what it amounts to. Raises `FormatError` of one sentence."""
    source = source.mended()
    name = format_name or detect(source)
    if name not in READERS:
        raise FormatError(f"there is no format {name}; formats are {', '.join(READERS)}")
    notes = Notes()
    for call in READERS[name](source, notes):
        forest.add(call)
    if not forest.executions and not forest.refused and LINE_NOT_UTF8 in notes.warnings:
        raise FormatError(NOT_UTF8)
    if not forest.executions and not forest.refused:
        raise FormatError(f"it has no model call of the format {name}")
    return _report(source.name, name, forest, notes, per_call=per_call)


def _report(file: str, name: str, forest: Forest, notes: Notes, *, per_call: bool) -> TreeReport:
    trees = forest.trees()
    figures = [tree.figures for tree in trees.values()]
    refused = Counter(forest.refused)
    for one in figures:
        refused.update(one.refused)
    rows = [row for execution, tree in trees.items() for row in _rows(forest, execution, tree)]
    transitions = Counter(row.transition for row in rows if row.transition != "root")
    diagnoses = Counter(row.diagnosis for row in rows if row.diagnosis is not None)
    agents = forest.refused_agents + Counter(row.agent for row in rows)
    unit = "tokens" if forest.encode is not None else forest.unit or "messages"
    path, unique = sum(one.path_tokens for one in figures), _unique(list(trees.values()))
    return TreeReport(
        file=file,
        format=name,
        unit=unit,
        executions=len(trees),
        calls=sum(one.calls for one in figures) + sum(forest.refused.values()),
        events=sum(one.events for one in figures),
        path_tokens=path,
        unique_nodes=unique,
        leaves=sum(one.leaves for one in figures),
        leaf_kinds=dict(sorted(_leaf_kinds(forest, trees).items())),
        refused=Refused(sum(refused.values()), dict(sorted(refused.items()))),
        transitions=dict(sorted(transitions.items())),
        diagnoses=dict(sorted(diagnoses.items())),
        dedup_ratio=round(path / unique, 4) if unique else 1.0,
        agents=dict(sorted(agents.items())),
        roles=dict(sorted(Counter(row.role for row in rows).items())),
        ignored=dict(sorted(notes.ignored.items())),
        warnings=tuple(f"{text} ({many} times)" if many > 1 else text for text, many in sorted(notes.warnings.items())),
        facts=notes.facts,
        per_call=tuple(rows) if per_call else (),
    )


def _unique(trees: list[Tree]) -> int:
    """Nodes of all executions together."""
    if len(trees) == 1:
        return trees[0].trie.size
    together = Trie()
    for tree in trees:
        for node in tree.nodes:
            if not node.children:
                together.insert(ROOT, tree.tokens(node))
    return together.size


def _leaf_kinds(forest: Forest, trees: dict[str, Tree]) -> Counter[str]:
    found: Counter[str] = Counter()
    for execution, tree in trees.items():
        agents = forest.executions[execution].agents
        following: dict[str, Node] = {}
        for node in reversed(tree.nodes):
            after = following.get(agents[node.call])
            following[agents[node.call]] = node
            if node.children:
                continue
            if node.refused == "superseded":
                found["retried"] += 1
            elif after is None:
                found["final"] += 1
            else:
                found["compacted" if after.kind == "compaction" else "abandoned"] += 1
    return found


def _rows(forest: Forest, execution: str, tree: Tree) -> list[CallRow]:
    roles = structural(tree.nodes)
    return [_row(forest, execution, node, roles[node.call]) for node in tree.nodes]


def _row(forest: Forest, execution: str, node: Node, role: Role) -> CallRow:
    agents = forest.executions[execution].agents
    kind, diagnosis = node.kind, node.diagnosis
    if forest.unit == "messages" and diagnosis is not None:
        # Messages that differ though they show the same text differ in what is told of their reasoning.
        diagnosis = "template" if kind == "realign" else "edit"
    return CallRow(
        execution=execution,
        call=node.call,
        agent=agents[node.call],
        role=role,
        transition=kind,
        related=node.related.call if node.related is not None else None,
        offset=node.offset,
        diagnosis=diagnosis,
        events=node.events,
        length=node.length,
        refused=node.refused,
    )
