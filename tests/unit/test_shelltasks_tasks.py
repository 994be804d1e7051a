"""Tasks are pure functions of their numbers; evaluation is written with reserved words only."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.proto.ids import check_token
from opengyre.shelltasks import words
from opengyre.shelltasks.demonstrate import demonstrate, demonstrations, expected_output
from opengyre.shelltasks.tasks import DONE, FAMILIES, generate, instruction, plan, reference

COMMAND_WORDS = set(re.findall("[a-z]+", "write into rename to count the lines of copy the file that contains then"))
SUFFIXES = frozenset(suffix.removeprefix(".") for suffix in words.SUFFIXES)

splits = st.sampled_from(["train", "eval"])
numbers = st.integers(0, 10**6)


def _vocabulary(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text)) - COMMAND_WORDS - SUFFIXES


def test_the_lists_have_nothing_in_common() -> None:
    lists = (words.TRAIN_WORDS, words.EVAL_WORDS, words.TRAIN_STEMS, words.EVAL_STEMS)
    everything = [word for part in lists for word in part]
    assert len(everything) == len(set(everything))
    assert not set(everything) & (COMMAND_WORDS | SUFFIXES | {DONE, "echo", "mv", "cp", "wc", "grep", "cat"})


@given(splits, numbers, numbers)
def test_a_task_is_a_function_of_split_index_and_seed(split, index: int, seed: int) -> None:
    task = generate(split, index, seed)
    assert task == generate(split, index, seed)
    assert task.task == check_token("task", task.task)
    assert task.family == FAMILIES[index % len(FAMILIES)]
    assert sum(check.weight for check in task.checks) == pytest.approx(1)
    assert task.purpose == ("train" if split == "train" else "evaluate")


@given(numbers, numbers)
def test_evaluation_uses_reserved_words_and_training_never_does(index: int, seed: int) -> None:
    reserved = {*words.EVAL_WORDS, *words.EVAL_STEMS}
    train, evaluate = (
        _vocabulary(" ".join([task.instruction, *task.files, *task.files.values()]))
        for task in (generate("train", index, seed), generate("eval", index, seed))
    )
    assert evaluate <= reserved
    assert not train & reserved


@given(st.integers(0, 2**32))
def test_invented_words_are_never_reserved(seed: int) -> None:
    word = words.invent(random.Random(seed))
    assert word not in {*words.EVAL_WORDS, *words.EVAL_STEMS}
    assert re.fullmatch("[a-z]{3,9}", word)


def test_no_word_of_a_list_is_part_of_another() -> None:
    for part in (words.TRAIN_WORDS, words.EVAL_WORDS):
        assert [(one, other) for one in part for other in part if one != other and one in other] == []


def test_tasks_differ() -> None:
    tasks = [generate("train", index, 1).instruction for index in range(500)]
    assert len(set(tasks)) > 490
    assert generate("train", 3, 1).instruction != generate("train", 3, 2).instruction


@settings(max_examples=400)
@given(splits, numbers, numbers)
def test_the_sought_word_is_in_one_file_only(split, index: int, seed: int) -> None:
    task = plan(split, index - index % 5 + 3, seed)
    assert task.family == "find"
    assert [name for name, text in task.files.items() if task.word in text] == [task.answer]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="index"):
        plan("train", -1, 0)


def test_demonstrations_are_noisy_and_deterministic() -> None:
    made = demonstrations(1000, seed=5)
    assert made == demonstrations(1000, seed=5)
    assert made != demonstrations(1000, seed=6)
    assert 0.4 < sum(one.right for one in made) / 1000 < 0.5
    assert all(one.turns[-1].command == DONE and one.turns[-1].observation is None for one in made)
    assert all(len(one.turns) <= 4 for one in made)


def test_no_demonstration_holds_a_reserved_word() -> None:
    reserved = {*words.EVAL_WORDS, *words.EVAL_STEMS}
    said = " ".join(message["content"] for one in demonstrations(2000, seed=1) for message in one.messages())
    assert not _vocabulary(said) & reserved


@given(numbers, numbers)
def test_a_right_demonstration_is_the_reference(index: int, seed: int) -> None:
    task = plan("train", index, seed)
    shown = demonstrate(task, random.Random(seed), right=1.0)
    assert shown.right
    assert shown.instruction == instruction(task)
    assert tuple(turn.command for turn in shown.turns) == (*reference(task), DONE)
    assert [turn.observation for turn in shown.turns[:-1]] == [expected_output(task, c) for c in reference(task)]
