"""The synthetic agent's draws: how long its calls are and what it scores. Pure.

All is a function of the run's seed, the group and the member (`group_seed` and `seed` of the dispatch), so that a
rerun, another replica and another policy of cells meet the same load.
"""

import hashlib
import itertools
import math
import statistics

from opengyre.proto.episode import EpisodeDispatch
from opengyre.proto.traj import Part

NEXT = "go on"
"""What the agent says between its calls."""
_NORMAL = statistics.NormalDist()


def uniform(seed: int, purpose: str) -> float:
    """A number in (0, 1)."""
    digest = hashlib.blake2b(f"synthetic:{purpose}:{seed}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / (1 << 52)


def total_tokens(dispatch: EpisodeDispatch) -> int:
    """Lognormal, with the harness's mean and sigma; `synthetic_shared` of the log's variance is the group's."""
    harness = dispatch.harness
    shared = harness.synthetic_shared
    common = _NORMAL.inv_cdf(uniform(dispatch.group_seed, "length"))
    own = _NORMAL.inv_cdf(uniform(dispatch.seed, "length"))
    sigma = harness.synthetic_sigma
    z = math.sqrt(shared) * common + math.sqrt(1 - shared) * own
    return max(harness.synthetic_turns, round(harness.synthetic_tokens * math.exp(sigma * z - sigma * sigma / 2)))


def lengths(dispatch: EpisodeDispatch) -> tuple[int, ...]:
    """Tokens of each call: at least one, together `total_tokens`, the shares between half and one and a half."""
    turns = dispatch.harness.synthetic_turns
    shares = [0.5 + uniform(dispatch.seed, f"turn{turn}") for turn in range(turns)]
    free = total_tokens(dispatch) - turns
    edges = [round(free * sum(shares[:turn]) / sum(shares)) for turn in range(turns + 1)]
    return tuple(1 + after - before for before, after in itertools.pairwise(edges))


def verdict(dispatch: EpisodeDispatch) -> Part:
    """The one part of the score, which says what it is."""
    return Part(
        name="synthetic",
        weight=1.0,
        value=round(uniform(dispatch.seed, "score"), 3),
        output="synthetic: a draw from the execution's seed; nothing was verified",
    )
