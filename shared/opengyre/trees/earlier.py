"""Among the calls of an execution, those before one: which begins its prompt, and which shares most with it.

Calls are taken in log order (`see`). What is asked stays cheap where paths lead through thousands of forks: a run that
was climbed through in vain is jumped over the next time, and the latest call below a place is the maximum of a range,
because all that lies below a place is contiguous when each run is walked from its deep end to its begin.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence

from opengyre.trees.calls import Node
from opengyre.trees.trie import Position, Trie


class Earlier:
    def __init__(self, trie: Trie, nodes: Sequence[Node]) -> None:
        """`nodes`: all that will be seen."""
        self._trie = trie
        self._below = _Below(trie, nodes)
        self._deepest: dict[int, int] = {}
        """Run -> how deep the paths seen so far go in it."""
        self._ends: dict[int, dict[int, Node]] = defaultdict(dict)
        """Run -> depth -> the latest call that ends there."""
        self._depths: dict[int, list[int]] = defaultdict(list)
        self._jumps: dict[int, Position] = {}
        """Run -> a place above it; no call ends between that and its begin."""
        self._jumped: dict[int, int] = {}
        """Run -> up to which depth jumps pass through it."""
        self._prompts: dict[object, list[Node]] = defaultdict(list)

    def see(self, node: Node) -> None:
        """From now on `node` is before."""
        at = node.end
        while at.depth > self._deepest.get(at.run, 0):
            self._deepest[at.run] = at.depth
            at = self._trie.up(at)
        self._below.see(node)
        run, depth = node.end
        if depth:
            if depth not in self._ends[run]:
                insort(self._depths[run], depth)
            self._ends[run][depth] = node
            if depth <= self._jumped.get(run, 0):
                self._jumps.clear()
                self._jumped.clear()
        self._prompts[node.question].append(node)

    def same_prompt(self, node: Node) -> list[Node]:
        return self._prompts.get(node.question, [])

    def prompts(self) -> list[list[Node]]:
        """Calls of one prompt each, in order."""
        return list(self._prompts.values())

    def longest_end(self, node: Node) -> Node | None:
        """The call of which all begins the prompt, the longest, and of those the latest."""
        at = node.start
        passed: list[int] = []
        found: Node | None = None
        while at.depth:
            depths = self._depths.get(at.run, ())
            place = bisect_right(depths, at.depth)
            if place:
                found = self._ends[at.run][depths[place - 1]]
                break
            self._jumped[at.run] = max(at.depth, self._jumped.get(at.run, 0))
            passed.append(at.run)
            at = self._jumps.get(at.run) or self._trie.up(at)
        self._jumps.update(dict.fromkeys(passed, at))
        return found

    def most_shared(self, node: Node) -> tuple[Node | None, int]:
        """The latest of the calls that share most tokens with the prompt, and how many."""
        at = node.start
        while at.depth:
            deepest = self._deepest.get(at.run)
            if deepest is not None:
                offset = min(at.depth, deepest)
                return self._below.latest(Position(at.run, offset)), offset
            at = self._trie.up(at)
        return None, 0


class _Below:
    """The latest call that was seen below a place."""

    def __init__(self, trie: Trie, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._number = {id(node): number for number, node in enumerate(nodes)}
        self._place: dict[int, int] = {}
        """Node's number -> its place in the order of the walk."""
        self._spans: dict[int, tuple[int, list[int], list[int]]] = {}
        """Run -> the first place below it; what leaves it or ends in it: negative depths, and the place after each."""
        self._walk(trie)
        self._size = max(1, len(nodes))
        self._latest = [-1] * (2 * self._size)

    def _walk(self, trie: Trie) -> None:
        leaving: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Run -> (negative depth, number of a call that ends there, or ~run of what leaves it there)."""
        known: set[int] = set()
        for number, node in enumerate(self._nodes):
            leaving[node.end.run].append((-node.end.depth, number))
            run, at = node.end.run, node.end
            while run and run not in known:
                known.add(run)
                at = trie.up(at)
                leaving[at.run].append((-at.depth, ~run))
                run = at.run
        place = 0
        stack: list[tuple[int, int]] = [(0, 0)]
        for items in leaving.values():
            items.sort()
        while stack:
            run, done = stack.pop()
            items = leaving[run]
            if done == 0:
                self._spans[run] = (place, [depth for depth, _ in items], [])
            else:
                self._spans[run][2].append(place)
            if done < len(items):
                stack.append((run, done + 1))
                what = items[done][1]
                if what < 0:
                    stack.append((~what, 0))
                else:
                    self._place[what] = place
                    place += 1

    def see(self, node: Node) -> None:
        number = self._number[id(node)]
        at = self._place[number] + self._size
        while at:
            self._latest[at] = max(self._latest[at], number)
            at //= 2

    def latest(self, at: Position) -> Node | None:
        first, depths, after = self._spans[at.run]
        count = bisect_right(depths, -at.depth)
        if not count:
            return None
        low, high, best = first + self._size, after[count - 1] + self._size, -1
        while low < high:
            if low & 1:
                best, low = max(best, self._latest[low]), low + 1
            if high & 1:
                high -= 1
                best = max(best, self._latest[high])
            low, high = low // 2, high // 2
        return self._nodes[best] if best >= 0 else None
