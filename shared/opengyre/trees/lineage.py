"""How calls stand to each other: which goes on from which, and why one does not.

In the order of the log each call is looked for among those before it. Its `parent` is the declared one if all of that
begins its prompt, else the longest that does. `related` is the call that shares most tokens with the prompt (the latest
of several); where that is not the parent, the call diverges, and its kind is told from where it diverges and from what
of the abandoned part comes again in it:

- the prompt is that of another call: `retry`;
- it begins with all of a call that its agent had gone on from already: the history was taken back, `fork`;
- most of the completions after the divergence come again: the history was rewritten, `realign` if only in its tokens
  (the template, retokenisation), `fork` if in what it says;
- one or few come again, or that of a call elsewhere, in a prompt that is shorter: `compaction`;
- none comes again: `branch`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opengyre.trees.blocks import Tokens
from opengyre.trees.calls import Diagnosis, Kind, Node, base
from opengyre.trees.earlier import Earlier
from opengyre.trees.trie import Trie

LOOK_BACK = 8
"""Completions that are searched for in a prompt that diverges."""
DECODED = 1024
"""Tokens after a divergence whose texts are compared."""
WINDOW = 16
"""Tokens of a completion, at its end, that must come again."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What is known of the tokens' text."""

    decode: Callable[[Sequence[int]], str] | None = None
    special: frozenset[int] = frozenset()
    """Ids that stand for no text: the template's."""
    shortest: int = 4
    """A completion that is shorter says nothing when it comes again. 1 for trees of messages."""


def relate(trie: Trie, nodes: Sequence[Node], texts: Texts) -> None:
    """Fill in `parent`, `related`, `kind`, `offset`, `diagnosis`, `children` and `superseded` of nodes in log order."""
    earlier = Earlier(trie, nodes)
    by_name: dict[str, Node] = {}
    for number, node in enumerate(nodes):
        declared = by_name.get(node.given.parent) if node.given.parent is not None else None
        node.parent_missing = node.given.parent is not None and declared is None
        whole = declared is not None and _begins(trie, declared, node)
        node.parent = declared if whole else earlier.longest_end(node)
        if node.parent is not None:
            node.parent.children.append(node)
        if number:
            related, offset = earlier.most_shared(node)
            before = nodes[max(0, number - LOOK_BACK) : number]
            _classify(trie, node, related or nodes[number - 1], offset, before, earlier, texts)
        if node.kind not in ("extend", "retry"):
            node.doubled = _doubled(trie, node, texts)
        by_name[node.call] = node
        earlier.see(node)
    for same in earlier.prompts():
        used = [node for node in same if node.children or node.given.wanted] or same[-1:]
        for node in same:
            if node not in used:
                node.refused = node.refused or "superseded"


def _begins(trie: Trie, parent: Node, node: Node) -> bool:
    return parent.length <= node.start.depth and trie.prefix(node.start, parent.length) == parent.end


def _classify(
    trie: Trie, node: Node, related: Node, offset: int, before: Sequence[Node], earlier: Earlier, texts: Texts
) -> None:
    same = earlier.same_prompt(node)
    parent = node.parent
    if same:
        node.kind, node.related, node.offset = "retry", same[-1], node.start.depth
    elif parent is not None and (parent.length == offset or parent.call == node.given.parent):
        node.kind, node.related, node.offset = "extend", parent, parent.length
        if _taken_back(node, parent):
            node.kind, node.diagnosis = "fork", "edit"
    else:
        node.related, node.offset = related, offset
        if node.given.adapter != related.given.adapter:
            node.kind = node.given.kind or "branch"  # Another policy's context, whatever it says.
            return
        if _says_the_same(trie, node, related, offset, texts):
            node.kind, node.diagnosis = node.given.kind or "realign", "retokenisation"
            return
        node.kind = node.given.kind or _divergence(trie, node, related, offset, before, texts)
        if node.kind in ("realign", "fork"):
            node.diagnosis = _diagnose(trie, node, related, offset, texts)
            if node.given.kind is None:
                node.kind = "fork" if node.diagnosis == "edit" else "realign"


def _taken_back(node: Node, parent: Node) -> bool:
    """Whether its agent had gone on from there before: what came of that is abandoned."""

    def whose(one: Node) -> tuple[str, str]:
        return one.given.agent, base(one.given.role)

    return any(other is not node and whose(other) == whose(node) for other in parent.children)


def _divergence(trie: Trie, node: Node, related: Node, offset: int, before: Sequence[Node], texts: Texts) -> Kind:
    if base(node.given.role) != base(related.given.role):
        return "branch"
    rest = trie.ids(node.start, offset)
    if offset > related.start.depth:
        return "fork"  # Inside the completion, some of which is there.
    lineage: list[Node] = []
    one: Node | None = related
    while one is not None and one.length > offset and len(lineage) < LOOK_BACK:
        lineage.append(one)
        one = one.parent
    found = [past for past in lineage if _comes_again(trie, past, rest, texts)]
    shorter = 2 * len(rest) < related.length - offset
    if len(found) * 2 > len(lineage) and not (len(lineage) == 1 and shorter):
        return "fork"
    if not found and node.start.depth < related.length:
        found = [past for past in reversed(before) if past not in lineage and _comes_again(trie, past, rest, texts)]
    if found:
        node.summary = found[0]
        return "compaction"
    return "branch"


def _comes_again(trie: Trie, past: Node, rest: Tokens, texts: Texts) -> bool:
    """Whether the end of a completion is somewhere in `rest`, with its last token (a stop token, mostly) or without."""
    if past.events < texts.shortest:
        return False
    completion = trie.ids(past.end, max(past.start.depth, past.length - WINDOW))
    return contains(rest, completion) or (
        len(completion) > max(1, texts.shortest - 1) and contains(rest, completion[:-1])
    )


def contains(tokens: Tokens, part: Tokens) -> bool:
    """Whether `part` is a stretch of `tokens`."""
    return find(tokens, part) >= 0


def find(tokens: Tokens, part: Tokens, start: int = 0) -> int:
    """Where `part` first is in `tokens`, from `start` on; -1 if it is not."""
    haystack, needle, width = tokens.tobytes(), part.tobytes(), tokens.itemsize
    at = haystack.find(needle, start * width)
    while at >= 0 and at % width:
        at = haystack.find(needle, at + 1)
    return at // width if at >= 0 else -1


def _says_the_same(trie: Trie, node: Node, related: Node, offset: int, texts: Texts) -> bool:
    """Whether what follows the divergence is, in other tokens, the text that was there."""
    if texts.decode is None or not offset < related.length:
        return False
    first = max(0, offset - 4)  # The text of a token may depend on those before.
    was = texts.decode(trie.ids(trie.prefix(related.end, offset + DECODED), first).tolist())
    now = texts.decode(trie.ids(trie.prefix(node.start, offset + 2 * DECODED), first).tolist())
    return now.startswith(was)


def _doubled(trie: Trie, node: Node, texts: Texts) -> int:
    """Length of the stretch that the prompt, from where it diverges, has twice in a row."""
    new = trie.ids(node.start, node.offset)
    window = new[: 4 * texts.shortest]
    if len(window) < 4 * texts.shortest:
        return 0
    # What was there right before once more: no longer than what is new, so the cost is that of what is new.
    before = trie.ids(trie.prefix(node.start, node.offset), max(0, node.offset - len(new)))
    place = find(before, window)
    if place >= 0 and np.array_equal(before[place:], new[: len(before) - place]):
        return len(before) - place
    place = find(new, window, 1)  # Or what is new, twice.
    if place > 0 and np.array_equal(new[:place], new[place : 2 * place]):
        return place
    return 0


def _diagnose(trie: Trie, node: Node, related: Node, offset: int, texts: Texts) -> Diagnosis:
    """Why the same history is told in other tokens; `edit` if it is another history."""
    old, new = trie.ids(related.end, offset), trie.ids(node.start, offset)
    if len(new) and len(old) and (int(old[0]) in texts.special or int(new[0]) in texts.special):
        return "template"
    if offset >= related.start.depth and _comes_again(trie, related, new, texts):
        return "template"  # What was said before it is gone, the rest of the completion is there.
    return "edit"
