"""What the live executions need of the engines, and how long training takes, measured. Pure: readings come with times.

An execution needs the engines only part of its time (its tools run meanwhile). So demand is the executions that were
begun, times the share of them that has a call in flight, and one call for each that is not begun yet. The share is 1
until it is measured; it is believed sooner when it grows (`FORGET_S`) than when it falls (`FALL_S`, and the time of
several switches): too few cells slow every rollout, one too many idles.
"""

import math
from collections.abc import Iterable

from opengyre.proto.decision import CellView
from opengyre.proto.host import HostState
from opengyre.proto.update import UpdateStats

FORGET_S = 5.0
FALL_S = 15.0
FALL_SWITCHES = 20
LATEST = 0.3
"""Weight of the latest contribution in the mean time that an execution takes to train."""


class Demand:
    def __init__(self) -> None:
        self._share: float | None = None
        self._at = 0.0
        self._execution_s: float | None = None

    def observe(self, cells: Iterable[CellView], begun: int, now: float, switch_s: float = 0.0) -> None:
        """Take a reading at `now` (seconds, monotonic): no news where nothing serves or nothing is begun."""
        serving = [cell for cell in cells if cell.settled and cell.state is HostState.ROLLOUT]
        if not serving or begun <= 0:
            return
        share = min(1.0, sum(cell.running for cell in serving) / begun)
        if self._share is None:
            self._share, self._at = 1.0, now
        constant = FORGET_S if share > self._share else max(FALL_S, FALL_SWITCHES * switch_s)
        keep = math.exp(-max(0.0, now - self._at) / constant)
        self._share = keep * self._share + (1 - keep) * share
        self._at = now

    def calls(self, live: int, begun: int) -> float | None:
        """Calls in flight that `live` executions keep up, of which `begun` were started; None until it is measured."""
        if self._share is None or live <= 0:
            return None
        return max(1.0, live - begun + begun * self._share)

    def trained(self, stats: UpdateStats) -> None:
        """Take what a contribution took."""
        if stats.executions <= 0 or stats.busy_s <= 0:
            return
        each = stats.busy_s / stats.executions
        before = each if self._execution_s is None else self._execution_s
        self._execution_s = (1 - LATEST) * before + LATEST * each

    def train_s(self, group_size: int) -> float | None:
        """How long one cell trains a group; None until it is measured."""
        return None if self._execution_s is None else self._execution_s * group_size
