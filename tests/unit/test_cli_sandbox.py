"""Which sandboxes the options of `gyre sandbox` mean, and how times are shown: no I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.cli.sandbox_select import Wanted, age, labels, seconds, wanted
from opengyre.cli.stack import StackError
from opengyre.proto.sandbox import SandboxInfo


def info(age_s: float = 100.0, owner: str = "me", **given_labels: str) -> SandboxInfo:
    return SandboxInfo(
        sandbox="s", node="n", owner=owner, labels=given_labels, isolated=True, age_s=age_s, expires_in_s=1.0,
        execs=0, running=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "takes"),
    [
        (Wanted(), True),
        (Wanted(labels={"run": "a"}), True),
        (Wanted(labels={"run": "b"}), False),
        (Wanted(labels={"run": "a", "group": "g"}), False),
        (Wanted(owner="me"), True),
        (Wanted(owner="you"), False),
        (Wanted(older_s=100.0), True),
        (Wanted(older_s=100.1), False),
        (Wanted(labels={"run": "a"}, owner="you"), False),
    ],
)
def test_all_that_is_said_must_hold(chosen: Wanted, takes: bool) -> None:
    assert chosen.takes(info(run="a")) is takes


def test_nothing_said_means_none_and_all_stands_alone() -> None:
    assert wanted({}, None, None, every=False) is None
    assert wanted({}, None, None, every=True) == Wanted()
    assert wanted({"a": "b"}, "o", "2h", every=False) == Wanted({"a": "b"}, "o", 7200.0)
    with pytest.raises(StackError, match="--all is given beside"):
        wanted({}, "o", None, every=True)


@pytest.mark.parametrize(("text", "span"), [("90s", 90), ("1.5m", 90), ("2h", 7200), (" 1d ", 86_400)])
def test_a_span_has_a_unit(text: str, span: float) -> None:
    assert seconds(text) == span


@pytest.mark.parametrize("text", ["", "5", "5w", "-5s", "s", "1h30m", "nans"])
def test_a_span_that_is_none_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(StackError, match=r"--older-than is .*; allowed is a number with s, m, h or d"):
        seconds(text)


def test_labels_are_pairs() -> None:
    assert labels(None) == {}
    assert labels(["a=b", "c=d=e", "f="]) == {"a": "b", "c": "d=e", "f": ""}
    for text in ("a", "=b", ""):
        with pytest.raises(StackError, match="allowed is KEY=VALUE"):
            labels([text])


def test_ages_in_two_units() -> None:
    spans = (-1, 4.21, 59.9, 60, 200, 3600, 7500, 86_400, 100_000)
    shown = ["0.0 s", "4.2 s", "59.9 s", "1 m 00 s", "3 m 20 s", "1 h 00 m", "2 h 05 m", "1 d 00 h", "1 d 03 h"]
    assert [age(span) for span in spans] == shown


@given(st.floats(min_value=0, max_value=1e9))
def test_every_age_can_be_shown(span_s: float) -> None:
    assert age(span_s)
