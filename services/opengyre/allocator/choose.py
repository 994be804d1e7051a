"""Which run is led. Pure."""

from collections.abc import Mapping

from opengyre.proto.run import RunSpec


def current(runs: Mapping[str, RunSpec], revisions: Mapping[str, int]) -> RunSpec | None:
    """The active run, of several the one that has waited longest; without one, the run that changed last.

    A finished run is led on so that its last groups, and tasks that evaluate it, are seen through.
    """
    active = [run for run, spec in runs.items() if spec.state == "active"]
    if active:
        return runs[min(active, key=lambda run: revisions[run])]
    if runs:
        return runs[max(runs, key=lambda run: revisions[run])]
    return None
