"""Identifiers, as tokens of NATS subjects.

An execution's id holds its group and its member number, so whoever meets one knows where it belongs:
`run` / `run-g000012` / `run-g000012-e03`.
"""

import re

TOKEN = re.compile(r"[A-Za-z0-9_-]{1,96}")
RUN = re.compile(r"[A-Za-z0-9_]{1,32}")


class BadIdentifierError(ValueError):
    """An identifier that cannot be a token of a subject."""


def check_token(name: str, value: str) -> str:
    """Return `value` if it can be a subject token, else raise an error that names the field."""
    if not TOKEN.fullmatch(value):
        raise BadIdentifierError(f"{name} {value!r} is not allowed: 1 to 96 of the characters A-Z a-z 0-9 _ -")
    return value


def check_run(value: str) -> str:
    """Return `value` if it can name a run (no `-`, which separates the parts of longer ids)."""
    if not RUN.fullmatch(value):
        raise BadIdentifierError(f"run {value!r} is not allowed: 1 to 32 of the characters A-Z a-z 0-9 _")
    return value


def group_id(run: str, sequence: int) -> str:
    """The group that was admitted as number `sequence` (from 0) of `run`."""
    return f"{run}-g{sequence:06d}"


def execution_id(group: str, member: int) -> str:
    """Member `member` (from 0) of `group`."""
    return f"{group}-e{member:02d}"


def run_of(group_or_execution: str) -> str:
    """The run a group or an execution belongs to."""
    return group_or_execution.partition("-")[0]


def group_of(execution: str) -> str:
    """The group an execution belongs to."""
    return execution.rpartition("-")[0]
