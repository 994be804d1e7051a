"""The shell agent's prompt as a transcript that goes on, for base models (`harness.prompt = "transcript"`). Pure.

    Task: write plum into box.txt          a shot
    $ echo plum > box.txt
    $ done

    Task: rename a.txt to b.txt            the task
    $ ls                                   a turn: what was said, to the end of its line
    a.txt                                  what it printed
    $                                      here the model goes on

The system prompt, if any, is the first paragraph. Turns stand as they were said, white space included, so that a
transcript begins with the one before and what was sampled.
"""

from collections.abc import Sequence
from typing import Final

from opengyre.proto.run import Shot

STOP: Final = "\n"
"""A turn is one line."""
SIGN: Final = "$"


def _head(task: str) -> str:
    return f"Task: {task.strip()}\n{SIGN}"


def _turn(said: str, seen: str) -> str:
    """`said` begins with the space after the sign."""
    return f"{said}{STOP}{seen}{STOP if seen else ''}"


def _shot(shot: Shot) -> str:
    turns = (_turn(f" {turn.command.strip()}", turn.output.strip()) for turn in shot.turns)
    return f"{_head(shot.task)}{SIGN.join(turns)}\n"


def begin(system: str | None, shots: Sequence[Shot], task: str) -> str:
    """The transcript before the first turn."""
    told = f"{system.strip()}\n\n" if system else ""
    return f"{told}{''.join(map(_shot, shots))}{_head(task)}"


def after(turns: Sequence[tuple[str, str | None]]) -> str:
    """What follows it: each turn as it was said, and what was seen of it."""
    return "".join(f"{_turn(said, (seen or '').strip())}{SIGN}" for said, seen in turns)
