"""Tables of `gyre trajectory show`: whole in 120 columns, and each thing said once."""

from io import StringIO
from typing import Any

from rich.console import Console

from opengyre.cli.trajectory_show import show
from opengyre.gateway.examples import TREE_REPORT

CALL: dict[str, Any] = TREE_REPORT["tree"]["per_call"][0]


def shown(*calls: dict[str, Any], **tree: Any) -> list[str]:
    rows = [{**CALL, "call": f"c{turn}", "turn": turn, **one} for turn, one in enumerate(calls)]
    out = StringIO()
    report = {**TREE_REPORT, "tree": {**TREE_REPORT["tree"], "per_call": rows, **tree}}
    show(Console(file=out, width=120, highlight=False), report)
    return out.getvalue().splitlines()


LONG = {"text": "The quick brown fox jumps over the lazy dog, " * 4, "prompt_tokens": 123456, "sampled_tokens": 12345}


def test_show_cuts_no_heading_at_120_columns() -> None:
    compaction = {"transition": "compaction", "related": "c0", "offset": 120034, "role": "sub-agent-summary"}
    realign = {"transition": "realign", "related": "c1", "offset": 120034, "diagnosis": "retokenisation"}
    lines = shown(LONG, {**LONG, **compaction}, {**LONG, **realign, "potential": 0.5})
    (heading,) = (line for line in lines if "call" in line and "role" in line and "text" in line)
    names = ["call", "turn", "role", "how", "prompt", "new", "worth", "credit", "outcome", "text"]
    assert heading.replace("┃", " ").split() == names
    assert all(len(line) <= 120 for line in lines)
    first = next(line for line in lines if "root" in line)
    assert all(text in first for text in ("c0", "main", "123456", "12345", "0.25", "+1.20", "path 0"))


def test_show_gives_no_column_to_what_is_the_same_for_all() -> None:
    lines = shown({"potential": None, "advantage": 0.9}, {"potential": None, "advantage": 0.9})
    assert not any("worth" in line or ("credit" in line and "role" in line) for line in lines)


def test_why_nothing_is_trained_is_said_once() -> None:
    live = {"outcome": "not_trained", "reason": "the execution is live", "path": None, "advantage": None}
    refused = {"outcome": "refused", "reason": "superseded", "path": None, "advantage": None}
    lines = shown(live, live, refused, live)
    assert [line.strip() for line in lines if "the execution is live" in line] == ["not trained: the execution is live"]
    assert sum("not trained" in line for line in lines) == 4
    assert sum("refused: superseded" in line for line in lines) == 1
