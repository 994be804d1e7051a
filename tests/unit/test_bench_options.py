"""What the options of benches take, the sentences for the rest, and the end by a signal."""

import asyncio
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from opengyre.cli.bench_options import ENDING, chosen, numbers, tell, until_signal
from opengyre.cli.main import app
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


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["", "background"])
def handlers(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Those of a program that a shell starts; a background job's does not hear of Ctrl-C."""
    before = [signal.getsignal(number) for number in ENDING]
    wanted = [request.param, signal.SIG_DFL, signal.SIG_DFL]
    for number, handler in zip(ENDING, wanted, strict=True):
        signal.signal(number, handler)
    yield wanted
    for number, handler in zip(ENDING, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("runs", ["loop", "none"])
def test_a_signal_ends_a_bench_in_order_with_a_line_and_no_trace(
    capsys: pytest.CaptureFixture[str], handlers: list[Any], number: int, runs: str
) -> None:
    ended: list[str] = []

    async def loop() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.Event().wait()
        finally:
            if number != signal.SIGINT:
                signal.raise_signal(number)  # one more does not cut off the end
            await asyncio.sleep(0)
            ended.append("loop")

    @until_signal()
    def bench() -> None:
        if runs == "loop":
            asyncio.run(loop())
        try:
            signal.raise_signal(number)
        finally:
            ended.append("none")

    with pytest.raises(typer.Exit) as caught:
        bench()
    assert (caught.value.exit_code, caught.value.__suppress_context__) == (128 + number, True)
    assert capsys.readouterr().err == "stopped; nothing runs any more\n"
    assert ended == [runs]
    assert [signal.getsignal(number) for number in ENDING] == handlers


@pytest.mark.usefixtures("handlers")
def test_a_bench_under_nohup_goes_on_when_its_terminal_is_gone() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with until_signal():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_every_bench_ends_by_signal() -> None:
    (group,) = (group for group in app.registered_groups if group.name == "bench")
    assert group.typer_instance is not None
    commands = group.typer_instance.registered_commands
    assert len(commands) >= 7
    for command in commands:
        assert command.callback is not None
        assert command.callback.__code__ is until_signal()(print).__code__, command.name


def test_figures_are_told_in_one_of_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    tell({"a": 1}, True, print)
    tell({"a": 1}, False, lambda found: print(sorted(found)))
    assert "".join(capsys.readouterr().out.split()) == """{"a":1}['a']"""
