"""Whether trainer and engine agree about log-probs of one version, and what it may be where they do not. Pure.

Over tokens that the trained version itself sampled, `offset = trainer log-prob - engine log-prob` is rounding. Where it
is more, causes differ by two figures:

- the share of positive offsets, by size. Of tokens that are sampled from what the engine says, the mean offset is
  -KL(engine || trainer), so the share is at most a half; a truncated distribution gives each of its tokens more than
  the whole one, so the share is 0; and it is above a half only where what the engine says is not what it samples from.
- how offsets go with the engine's log-probs. Temperature stretches these, rounding knows nothing of them.

`tests/unit/test_trainer_parity.py` draws from distributions of each kind.
"""

import math
from typing import Final

from opengyre.proto.run import Optimization
from opengyre.proto.update import UpdateStats

ONE_SIDED: Final = 0.01
"""Share of positive offsets up to which they are all taken for negative."""
UNTRUE: Final = 0.55
"""Share of positive offsets from which log-probs are not of what was sampled from; a half, and some room for chance."""
GOES_WITH: Final = 0.3
"""Correlation of offsets and log-probs from which one goes with the other."""
ROUNDING: Final = 0.25
"""Mean gap up to which it may be rounding, nats: what bfloat16 makes of a model of many layers, and some more."""


def likely(stats: UpdateStats) -> str | None:
    """What makes the gap, as far as the figures tell; None without one."""
    found = stats.logprob_gap
    if not found:
        return None
    positive = (stats.logprob_gap_sum + stats.offset_sum) / (2 * stats.logprob_gap_sum)
    together = _correlation(stats)
    if positive <= ONE_SIDED:
        return "the engine samples from a part of the distribution (top-p, top-k, min-p)"
    if positive >= UNTRUE:
        return "the engine's log-probs are not of what it samples from (raw ones, of before the temperature)"
    if abs(together) >= GOES_WITH:
        other = "lower" if together < 0 else "higher"
        return f"the engine samples at a {other} temperature than it is told, or by other weights than its version's"
    if found <= ROUNDING:
        return "the engine computes in another precision (its own, that of keys and values, quantized weights)"
    return "the engine computes by other weights, or keys and values, than those of its version"


def _correlation(stats: UpdateStats) -> float:
    """Of offsets and the engine's log-probs, -1 to 1; 0 where either is constant."""
    n = stats.logprob_gap_tokens
    offset, behaviour = stats.offset_sum / n, stats.behaviour_sum / n
    offsets = stats.offset_square_sum / n - offset**2
    behaviours = stats.behaviour_square_sum / n - behaviour**2
    if offsets <= 0 or behaviours <= 0:
        return 0.0
    return (stats.offset_behaviour_sum / n - offset * behaviour) / math.sqrt(offsets * behaviours)


def alarm(optimization: Optimization, stats: UpdateStats) -> str | None:
    """What is wrong with an update's figures, in a sentence: trainer and engine disagree at one version."""
    found = stats.logprob_gap
    if found is None or found <= optimization.logprob_gap_alarm:
        return None
    return (
        f"trainer and engine are {found:.3g} nats apart in the mean of {stats.logprob_gap_tokens} tokens of one "
        f"version (at most {stats.logprob_gap_max:.3g}); optimization.logprob_gap_alarm is "
        f"{optimization.logprob_gap_alarm:g}; likely {likely(stats)}"
    )
