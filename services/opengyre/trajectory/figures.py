"""Metrics of the trajectory service."""

from prometheus_client import Counter, Histogram

from opengyre.trajectory.assemble import Assembled

GROUPS = Counter("gyre_groups_scored", "Groups that closed, by outcome", ["outcome"])
LATE = Counter("gyre_late_members", "Members that ended after their group had closed")
EXECUTIONS = Counter("gyre_executions_scored", "Executions by result: scored, or why there is no score", ["result"])
REFUSED = Counter("gyre_calls_refused", "Model calls that cannot be trained, by reason", ["reason"])
MALFORMED = Counter("gyre_trajectory_malformed", "Events of logs that became dead letters")
LEFT_OUT = Counter("gyre_tokens_left_out", "Sampled tokens that the bound on paths left out, by role", ["role"])
TRANSITIONS = Counter("gyre_tree_transitions", "How calls stand to those before them", ["kind"])
TOKENS = Counter("gyre_trajectory_tokens", "Tokens of ready groups: trained, on paths, and unique", ["kind"])
SECONDS = Histogram(
    "gyre_group_assembly_seconds", "From reading a group's log to its publication", buckets=(0.01, 0.03, 0.1, 0.3, 1, 3)
)


def count(assembled: Assembled) -> None:
    """Add a part of a group that was published."""
    scored, ready = assembled.scored, assembled.ready
    if scored.late:
        LATE.inc()
    else:
        GROUPS.labels(scored.outcome).inc()
    EXECUTIONS.labels("scored").inc(len(scored.scores))
    for reason in scored.unscored.values():
        EXECUTIONS.labels(reason).inc()
    if ready is not None:
        for reason, calls in ready.refused.items():
            REFUSED.labels(reason).inc(calls)
        TOKENS.labels("trained").inc(sum(member.trained_tokens for member in ready.members))
        TOKENS.labels("path").inc(sum(member.path_tokens for member in ready.members))
        TOKENS.labels("unique").inc(sum(member.unique_tokens for member in ready.members))
        for member in ready.members:
            for role, tokens in member.left_out.items():
                LEFT_OUT.labels(role).inc(tokens)
            for kind, calls in member.transitions.items():
                TRANSITIONS.labels(kind).inc(calls)
