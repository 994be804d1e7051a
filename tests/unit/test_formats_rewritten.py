"""A client that sends an answer back otherwise than it was given stays one agent with one history."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from opengyre.formats import Forest, Source, TreeReport, read_tree

Rewrite = Callable[[str], str]
ASKS = ("list the files", "now count them", "thank you")
ANSWERS = tuple(f"<think>step {number}: I consider it</think>\n\nThe answer is {number}." for number in range(3))


def read(rows: list[Any], *, tokens: bool = False) -> TreeReport:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    forest = Forest(encode=lambda text: list(text.encode()), decode=lambda ids: bytes(ids).decode()) if tokens else None
    return read_tree(Source("log", data), forest or Forest(), per_call=True)


def call(messages: list[Any], answer: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    return {"request": {"messages": messages}, "response": {"choices": [choice]}}


def conversation(rewrite: Rewrite) -> list[Any]:
    history: list[Any] = [{"role": "system", "content": "S"}]
    rows: list[Any] = []
    for ask, answer in zip(ASKS, ANSWERS, strict=True):
        history.append({"role": "user", "content": ask})
        rows.append(call(list(history), answer))
        history.append({"role": "assistant", "content": rewrite(answer)})
    return rows


def without_thought(answer: str) -> str:
    return answer.partition("</think>")[2].strip()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("rewrite", "transition", "diagnosis"),
    [
        (without_thought, "realign", "template"),
        (lambda answer: f"{answer}\n", "realign", "template"),
        (lambda answer: without_thought(answer).upper(), "fork", "edit"),
        (lambda answer: answer.removeprefix("<think>step "), "realign", "template"),
        (lambda answer: answer[:-4], "fork", "edit"),
    ],
)
def test_a_rewritten_answer_is_no_branch_of_a_sub_agent(
    rewrite: Rewrite, transition: str, diagnosis: str, tokens: bool
) -> None:
    found = read(conversation(rewrite), tokens=tokens)
    assert found.transitions == {transition: 2}
    assert found.diagnoses == {diagnosis: 2}
    assert found.roles == {"main": 3}


def test_an_answer_that_the_responses_api_gave_with_its_thought_comes_back_without() -> None:
    def asked(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "user", "content": text}

    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    rows = [
        {"request": {"input": [asked("go")]}, "response": {"output": [thought, said("x")]}},
        {"request": {"input": [asked("go"), said("x"), asked("on")]}, "response": {"output": [thought, said("y")]}},
    ]
    found = read(rows)
    assert (found.transitions, found.roles) == ({"realign": 1}, {"main": 2})


def test_another_answer_of_the_log_in_that_place_is_no_rewritten_one() -> None:
    rows = conversation(str)
    first, *_, last = rows[2]["request"]["messages"]
    cut = [first, {"role": "user", "content": ASKS[0]}, {"role": "assistant", "content": ANSWERS[1]}, last]
    rows[2] = call(cut, ANSWERS[2])
    assert "fork" not in read(rows).transitions


def test_another_context_stays_a_branch() -> None:
    rows = conversation(str)
    rows.append(call([{"role": "system", "content": "S"}, {"role": "user", "content": "another thing"}], "z"))
    found = read(rows)
    assert (found.transitions, found.roles) == ({"extend": 2, "branch": 1}, {"main": 3, "sub-agent": 1})
