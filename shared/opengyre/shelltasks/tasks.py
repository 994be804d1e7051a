"""Five families of shell tasks, generated deterministically.

A task is a pure function of (seed, split, index): the same everywhere, with no state. `Plan` holds what a family
needs to know about one task; `to_spec` states it as instruction, files and weighted checks. Nothing passes while
nothing was done, and the task's reference commands pass everything.

Families: `write` W into F; `rename` A to B; `count` the lines of A into B; `find` the file that contains W and copy
it to B; `chain`: write W into A, then copy A to B.
"""

import random
from dataclasses import dataclass, field
from typing import Final, Literal

from opengyre.proto.task import Check, TaskSpec
from opengyre.shelltasks import words

Split = Literal["train", "eval"]

FAMILIES: Final = ("write", "rename", "count", "find", "chain")
MAX_TURNS: Final = 4
INVENTED: Final = 0.9
"""Share of training tasks with invented words and file names."""
DONE: Final = "done"
"""What the agent says instead of a command when it thinks that the task is solved."""

_SCORE_EXISTS: Final = 0.2
_SCORE_CONTENT: Final = 0.3
_SCORE_EXACT: Final = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """One task before it is put into words.

    `word` is W, `source` is A (F for `write`), `target` is B; empty where the family has none. `answer` is the file
    that contains W (`find`). `spare_words` and `spare_files` occur nowhere in the task: material for mistakes.
    """

    task: str
    family: str
    split: Split
    word: str = ""
    source: str = ""
    target: str = ""
    answer: str = ""
    files: dict[str, str] = field(default_factory=dict)
    spare_words: tuple[str, ...] = ()
    spare_files: tuple[str, ...] = ()


def _invented(rng: random.Random, count: int) -> list[str]:
    """Invented words, none a part of another: `grep` must find one word in one file only."""
    chosen: list[str] = []
    while len(chosen) < count:
        word = words.invent(rng)
        if not any(word in other or other in word for other in chosen):
            chosen.append(word)
    return chosen


def plan(split: Split, index: int, seed: int) -> Plan:
    """Task number `index` (from 0) of `split` under `seed`; families take turns, all else is drawn."""
    if index < 0:
        raise ValueError(f"index is {index}; allowed are values from 0")
    rng = random.Random(f"shelltasks:{seed}:{split}:{index}")  # noqa: S311 - tasks, not secrets
    family = FAMILIES[index % len(FAMILIES)]
    task = f"{family}-{split}-s{seed}-{index:06d}"
    if split == "eval":
        stems, (word, *others) = rng.sample(words.EVAL_STEMS, 6), rng.sample(words.EVAL_WORDS, 6)
    elif rng.random() < INVENTED:
        stems, (word, *others) = _invented(rng, 6), _invented(rng, 6)
    else:
        stems, (word, *others) = rng.sample(words.TRAIN_STEMS, 6), rng.sample(words.TRAIN_WORDS, 6)
    first, second, *spare_files = [stem + rng.choice(words.SUFFIXES) for stem in stems]
    spare = tuple(others[3:])
    common = {"task": task, "family": family, "split": split, "spare_words": spare, "spare_files": tuple(spare_files)}
    if family == "write":
        return Plan(**common, word=word, source=first)
    if family == "rename":
        return Plan(**common, source=first, target=second, files={first: f"{others[0]}\n"})
    if family == "count":
        lines = rng.choices(others, k=rng.randint(2, 9))
        return Plan(**common, source=first, target=second, files={first: "".join(f"{line}\n" for line in lines)})
    if family == "find":
        places = [first, *spare_files[:2]]
        contents = [word, *others[:2]]
        files = {name: f"{text}\n" for name, text in sorted(zip(places, contents, strict=True))}
        common["spare_files"] = tuple(spare_files[2:])
        return Plan(**common, word=word, target=second, answer=first, files=files)
    return Plan(**common, word=word, source=first, target=second)


def instruction(plan: Plan) -> str:
    """What the agent is told."""
    match plan.family:
        case "write":
            return f"write {plan.word} into {plan.source}"
        case "rename":
            return f"rename {plan.source} to {plan.target}"
        case "count":
            return f"count the lines of {plan.source} into {plan.target}"
        case "find":
            return f"copy the file that contains {plan.word} to {plan.target}"
        case "chain":
            return f"write {plan.word} into {plan.source} then copy {plan.source} to {plan.target}"
    raise ValueError(f"family is {plan.family!r}; allowed are {', '.join(FAMILIES)}")


def reference(plan: Plan) -> tuple[str, ...]:
    """Commands that solve the task, without the final `done`."""
    match plan.family:
        case "write":
            return (f"echo {plan.word} > {plan.source}",)
        case "rename":
            return (f"mv {plan.source} {plan.target}",)
        case "count":
            return (f"wc -l < {plan.source} > {plan.target}",)
        case "find":
            return (f"grep -l {plan.word} *", f"cp {plan.answer} {plan.target}")
        case "chain":
            return (f"echo {plan.word} > {plan.source}", f"cp {plan.source} {plan.target}")
    raise ValueError(f"family is {plan.family!r}; allowed are {', '.join(FAMILIES)}")


def _holds(text: str, file: str) -> str:
    return f'[ "$(cat {file})" = "{text}" ]'


def checks(plan: Plan) -> tuple[Check, ...]:
    """Three parts: something is where it should be, it is partly right, it is exactly right."""
    first, second, text = plan.source, plan.target, plan.files
    match plan.family:
        case "write":
            exists, content = f"[ -f {first} ]", f"grep -q {plan.word} {first}"
            exact = _holds(plan.word, first)
        case "rename":
            exists, content = f"[ -f {second} ]", f"[ -f {second} ] && [ ! -e {first} ]"
            exact = f"[ ! -e {first} ] && {_holds(text[first].strip(), second)}"
        case "count":
            lines = text[first].count("\n")
            exists, content = f"[ -f {second} ]", f"grep -q '[0-9]' {second}"
            exact = f'[ "$(tr -d " " < {second})" = "{lines}" ]'
        case "find":
            same = " || ".join(f"cmp -s {second} {name}" for name in text)
            exists, content = f"[ -f {second} ]", same
            exact = _holds(plan.word, second)
        case "chain":
            exists, content = f"[ -f {first} ]", f"[ -f {second} ] && {_holds(plan.word, first)}"
            exact = f"{_holds(plan.word, first)} && {_holds(plan.word, second)}"
        case _:
            raise ValueError(f"family is {plan.family!r}; allowed are {', '.join(FAMILIES)}")
    return (
        Check(name="exists", command=exists, weight=_SCORE_EXISTS),
        Check(name="content", command=content, weight=_SCORE_CONTENT),
        Check(name="exact", command=exact, weight=_SCORE_EXACT),
    )


def to_spec(plan: Plan) -> TaskSpec:
    """The task as it is submitted."""
    return TaskSpec(
        task=plan.task,
        instruction=instruction(plan),
        files=plan.files,
        checks=checks(plan),
        max_turns=MAX_TURNS,
        purpose="train" if plan.split == "train" else "evaluate",
        family=plan.family,
        labels={"split": plan.split},
    )


def generate(split: Split, index: int, seed: int) -> TaskSpec:
    """Task number `index` (from 0) of `split` under `seed`: deterministic, and in `eval` of reserved words only."""
    return to_spec(plan(split, index, seed))
