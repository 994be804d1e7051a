"""A scripted demonstrator that is right only some of the time.

Its demonstrations teach the form of a turn and the copying of arguments, and leave a policy cloned from them with
much to learn. Every mistake is a command whose output is known without running it, so that demonstrations are a pure
function of the task and the random generator.
"""

import random
from dataclasses import dataclass
from typing import Final

from opengyre.shelltasks.tasks import DONE, Plan, Split, instruction, plan, reference

RIGHT: Final = 0.45
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


def _mistakes(plan: Plan, rng: random.Random) -> list[list[tuple[str, str]]]:
    """The wrong episodes that the demonstrator knows: lists of (command, output)."""
    word, first, second = plan.word, plan.source, plan.target
    wrong_word, wrong_file = rng.choice(plan.spare_words), rng.choice(plan.spare_files)
    match plan.family:
        case "write":
            return [
                [(f"echo {wrong_word} > {first}", "")],
                [(f"echo {word} > {wrong_file}", "")],
                [(f"echo {word}", word)],
                [],
            ]
        case "rename":
            return [[(f"cp {first} {second}", "")], [(f"mv {first} {wrong_file}", "")], []]
        case "count":
            return [
                [(f"wc -l {first} > {second}", "")],
                [(f"wc -l < {first} > {wrong_file}", "")],
                [(f"wc -c < {first} > {second}", "")],
                [(f"wc -l < {first}", str(plan.files[first].count(chr(10))))],
                [],
            ]
        case "find":
            found = (f"grep -l {word} *", plan.answer)
            other = rng.choice([name for name in plan.files if name != plan.answer])
            return [
                [(f"cp {other} {second}", "")],
                [found, (f"cp {plan.answer} {wrong_file}", "")],
                [found, (f"cp {other} {second}", "")],
                [found],
                [(f"echo {word} > {wrong_file}", "")],
            ]
        case _:
            written = (f"echo {word} > {first}", "")
            return [
                [written],
                [written, (f"cp {first} {wrong_file}", "")],
                [(f"echo {wrong_word} > {first}", ""), (f"cp {first} {second}", "")],
                [(f"echo {word} > {wrong_file}", "")],
            ]


def demonstrate(task: Plan, rng: random.Random, right: float = RIGHT) -> Demonstration:
    """One episode on `task`, solving it with probability `right`."""
    solves = rng.random() < right
    if solves:
        steps = [(command, expected_output(task, command)) for command in reference(task)]
    else:
        steps = rng.choice(_mistakes(task, rng))
    turns = [Turn(command, output) for command, output in steps]
    return Demonstration(instruction(task), (*turns, Turn(DONE, None)), solves)


def expected_output(task: Plan, command: str) -> str:
    """What a reference command prints: the file that was found, else nothing."""
    return task.answer if command.startswith("grep -l ") else ""


def demonstrations(count: int, seed: int, split: Split = "train", right: float = RIGHT) -> list[Demonstration]:
    """`count` episodes on the tasks 0 to `count - 1` of `split`, deterministic in `seed`."""
    rng = random.Random(f"demonstrations:{seed}:{split}:{right}")  # noqa: S311 - demonstrations, not secrets
    return [demonstrate(plan(split, index, seed), rng, right) for index in range(count)]
