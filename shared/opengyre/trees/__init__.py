"""Trees of model calls: reconstruction, sampling, weights, credit, roles. Pure: no I/O, no clock, no torch."""

from opengyre.trees.calls import ROLES, BadTokensError, Diagnosis, Figures, Given, Kind, Node, Role
from opengyre.trees.lineage import Texts
from opengyre.trees.roles import structural
from opengyre.trees.sampling import Chosen, Path, choose, shares
from opengyre.trees.tree import Added, Builder, Tree, build
from opengyre.trees.trie import Position, Segment, Trie

__all__ = [
    "ROLES",
    "Added",
    "BadTokensError",
    "Builder",
    "Chosen",
    "Diagnosis",
    "Figures",
    "Given",
    "Kind",
    "Node",
    "Path",
    "Position",
    "Role",
    "Segment",
    "Texts",
    "Tree",
    "Trie",
    "build",
    "choose",
    "shares",
    "structural",
]
