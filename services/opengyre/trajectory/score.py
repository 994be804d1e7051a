"""What a verifier's parts amount to. Pure."""

import math
from collections.abc import Sequence

from opengyre.proto.traj import Part


def score_of(parts: Sequence[Part]) -> float | None:
    """The weighted mean of the parts' values, in [0, 1]; None where there is nothing to weigh or it is no number."""
    total = math.fsum(part.weight for part in parts)
    if not total > 0 or not all(0 <= part.value <= 1 and part.weight >= 0 for part in parts):
        return None
    return min(1.0, math.fsum(part.weight * part.value for part in parts) / total)
