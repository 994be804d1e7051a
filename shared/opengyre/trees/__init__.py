"""Trees of model calls: reconstruction, sampling, weights, credit, roles. Pure: no I/O, no clock, no torch."""

from opengyre.trees.calls import BadTokensError, Diagnosis, Figures, Given, Kind, Node, Role
from opengyre.trees.lineage import Texts
from opengyre.trees.tree import Added, Builder, Tree, build
from opengyre.trees.trie import Position, Segment, Trie

__all__ = [
    "Added",
    "BadTokensError",
    "Builder",
    "Diagnosis",
    "Figures",
    "Given",
    "Kind",
    "Node",
    "Position",
    "Role",
    "Segment",
    "Texts",
    "Tree",
    "Trie",
    "build",
]
