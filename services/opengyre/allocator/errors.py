"""What ends a leader's term."""


class DeposedError(Exception):
    """Somebody else leads, or may: what was held in memory is void, and a new term begins with the lease."""
