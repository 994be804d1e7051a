"""How the simulation and a decision of the policy grow with the number of nodes."""

import time

import msgspec

from opengyre.sim.gyre import Gyre
from opengyre.sim.table1 import ROWS
from opengyre.sim.workload import PAPER

SCALES = (100, 1_000, 10_000)
DECIDE_EVERY_H = 0.01
"""The policy is asked so often at most: once in 36 s of the simulated time."""


class ScaleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run of 12 updates under `ours`; times are processor times of this machine."""

    nodes: int
    live_most: int
    events: int
    seconds: float
    microseconds_per_event: float
    decisions: int
    decision_ms_p50: float
    decision_ms_p99: float
    decision_ms_max: float
    efficiency: float


def measure(nodes: int) -> ScaleFacts:
    """Simulate the paper's work for each node on so many nodes."""
    gyre = Gyre(PAPER.scaled(nodes), ROWS["ours"].setting, 0, decide_every_h=DECIDE_EVERY_H, record=False, clock=True)
    began = time.process_time()
    outcome = gyre.run()
    seconds = time.process_time() - began
    took = sorted(outcome.decide_s)
    return ScaleFacts(
        nodes=nodes,
        live_most=outcome.live_most,
        events=outcome.events,
        seconds=round(seconds, 2),
        microseconds_per_event=round(1e6 * seconds / outcome.events, 1),
        decisions=outcome.decisions,
        decision_ms_p50=round(1e3 * took[len(took) // 2], 3),
        decision_ms_p99=round(1e3 * took[int(0.99 * (len(took) - 1))], 3),
        decision_ms_max=round(1e3 * took[-1], 3),
        efficiency=round(outcome.efficiency, 4),
    )
