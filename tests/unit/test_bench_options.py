"""What the options of benches take, the sentences for the rest, and the end by Ctrl-C."""

import re

import pytest
import typer

from opengyre.cli.bench_options import chosen, numbers, stopped, tell
from opengyre.cli.stack import StackError


@pytest.mark.parametrize(
    ("text", "wanted"), [("a", ["a"]), (" c , a,,", ["c", "a"]), ("b,a,b", ["b", "a"]), ("a,b,c", ["a", "b", "c"])]
)
def test_names_are_taken_once_and_in_order(text: str, wanted: list[str]) -> None:
    assert chosen("--parts", text, ("a", "b", "c")) == wanted


@pytest.mark.parametrize(("text", "wanted"), [("1", [1]), (" 64 , 1,", [64, 1]), ("2,02,2", [2])])
def test_numbers_are_taken_once_and_in_order(text: str, wanted: list[int]) -> None:
    assert numbers("--crowds", text, 1, 64) == wanted


@pytest.mark.parametrize("text", ["0", "65", "1,x", "-1", "1.5", "²", "٣", "9" * 5000])
def test_other_numbers_are_refused(text: str) -> None:
    wrong = text.rsplit(",", maxsplit=1)[-1]
    sentence = f"--crowds names {wrong!r}; allowed: whole numbers from 1 to 64"
    with pytest.raises(StackError, match=f"^{re.escape(sentence)}$"):
        numbers("--crowds", text, 1, 64)


@pytest.mark.parametrize("text", ["", " , "])
def test_nothing_is_refused(text: str) -> None:
    with pytest.raises(StackError, match=r"^--parts is empty; allowed: a, b$"):
        chosen("--parts", text, ("a", "b"))
    with pytest.raises(StackError, match=r"^--crowds is empty; allowed: whole numbers from 1 to 64$"):
        numbers("--crowds", text, 1, 64)


def test_another_name_is_refused() -> None:
    with pytest.raises(StackError, match=r"^--parts names 'x'; allowed: a, b$"):
        chosen("--parts", "a,x", ("a", "b"))


def test_ctrl_c_ends_with_a_line_and_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        stopped()
    assert (caught.value.exit_code, caught.value.__suppress_context__) == (130, True)
    assert capsys.readouterr().err == "stopped; nothing runs any more\n"


def test_figures_are_told_in_one_of_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    tell({"a": 1}, True, print)
    tell({"a": 1}, False, lambda found: print(sorted(found)))
    assert "".join(capsys.readouterr().out.split()) == """{"a":1}['a']"""
