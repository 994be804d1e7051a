"""Which role a call has where nobody says it, from the shape of the tree alone.

The first root is the main agent's. What extends, retries, rewrites or compacts a history belongs to whom that history
belongs to; a context of its own that begins with no other call's whole history is a sub-agent's. A call that nothing
goes on from, and whose completion a compaction carries over, was made to sum up.
"""

from collections.abc import Sequence

from opengyre.trees.calls import Node, Role, base


def structural(nodes: Sequence[Node]) -> dict[str, Role]:
    """Call -> role, of all nodes of one execution in log order; what is given stays."""
    roles: dict[str, Role] = {}
    for node in nodes:
        before = node.parent or (node.related if node.kind != "branch" else None)
        fresh: Role = "main" if node.kind == "root" else "sub-agent"
        role = base(roles[before.call]) if before is not None else fresh
        roles[node.call] = node.given.role or role
    for node in nodes:
        made = node.summary
        if made is not None and not made.children and made.given.role is None:
            roles[made.call] = "main-summary" if base(roles[made.call]) == "main" else "sub-agent-summary"
    return roles
