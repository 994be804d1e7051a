"""A scripted demonstrator that is right only some of the time.

Its demonstrations teach the form of a turn and the copying of arguments, and leave a policy cloned from them with
much to learn. Every mistake is a command whose output is known without running it, so that demonstrations are a pure
function of the task and the random generator.
"""

import random
from dataclasses import dataclass
from typing import Final

from opengyre.shelltasks.tasks import DONE, Plan, instruction, plan, reference

RIGHT: Final = 0.5
"""Share of demonstrations that solve their task."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said, and what the sandbox answered (None after `done`)."""

    command: str
    observation: str | None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode of the demonstrator; `right` says whether it solves the task."""

    instruction: str
    turns: tuple[Turn, ...]
    right: bool

    def messages(self) -> list[dict[str, str]]:
        """The episode as chat messages: user, then assistant and tool in turn."""
        messages = [{"role": "user", "content": self.instruction}]
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.command})
            if turn.observation is not None:
                messages.append({"role": "tool", "content": turn.observation})
        return messages


def _mistakes(plan: Plan) -> list[list[tuple[str, str]]]:
    """The wrong episodes that the demonstrator knows: lists of (command, output). All names in them are the task's."""
    word, first, second = plan.word, plan.source, plan.target
    match plan.family:
        case "write":
            return [
                [(f"echo {first} > {first}", "")],
                [(f"echo {word} > {word}", "")],
                [(f"echo {word}", word)],
                [],
            ]
        case "rename":
            return [
                [(f"cp {first} {second}", "")],
                [(f"echo {first} > {second}", "")],
                [(f"wc -l {first} > {second}", "")],
                [],
            ]
        case "count":
            return [
                [(f"wc -l {first} > {second}", "")],
                [(f"cp {first} {second}", "")],
                [(f"wc -c < {first} > {second}", "")],
                [(f"wc -l < {first}", str(plan.files[first].count("\n")))],
                [],
            ]
        case "find":
            found = (f"grep -l {word} *", plan.answer)
            return [
                [(f"echo {word}", word)],
                [found],
                [found, (f"cp {plan.answer} {word}", "")],
                [found, (f"echo {plan.answer} > {second}", "")],
                [found, (f"wc -l {plan.answer} > {second}", "")],
            ]
        case _:
            written = (f"echo {word} > {first}", "")
            return [
                [written],
                [written, (f"mv {first} {second}", "")],
                [(f"echo {word} > {second}", "")],
                [(f"echo {second} > {first}", ""), (f"cp {first} {second}", "")],
            ]


def demonstrate(task: Plan, rng: random.Random, right: float = RIGHT) -> Demonstration:
    """One episode on `task`, solving it with probability `right`."""
    solves = rng.random() < right
    if solves:
        steps = [(command, expected_output(task, command)) for command in reference(task)]
    else:
        steps = rng.choice(_mistakes(task))
    turns = [Turn(command, output) for command, output in steps]
    return Demonstration(instruction(task), (*turns, Turn(DONE, None)), solves)


def expected_output(task: Plan, command: str) -> str:
    """What a reference command prints: the file that was found, else nothing."""
    return task.answer if command.startswith("grep -l ") else ""


def demonstrations(count: int, seed: int, right: float = RIGHT) -> list[Demonstration]:
    """`count` episodes on the training tasks 0 to `count - 1`, deterministic in `seed`."""
    rng = random.Random(f"demonstrations:{seed}:{right}")  # noqa: S311 - demonstrations, not secrets
    return [demonstrate(plan("train", index, seed), rng, right) for index in range(count)]
