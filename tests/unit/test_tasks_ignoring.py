"""``.dockerignore`` as Docker reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.tasks.errors import TaskError
from opengyre.tasks.ignoring import kept, left_out, rules


@pytest.mark.parametrize(
    ("text", "out", "stays"),
    [
        ("# all\n*.md\n", ["README.md"], ["a/README.md", "md"]),
        ("**/*.md\n", ["README.md", "a/b/README.md"], ["a/md"]),
        ("*/temp*\n", ["a/temporary", "a/temp/x"], ["temp", "a/b/temp"]),
        ("temp?\n", ["tempa"], ["temp", "temp/"]),
        ("node_modules\n", ["node_modules", "node_modules/a/b"], ["a/node_modules"]),
        ("/build/\n", ["build", "build/x"], ["a/build"]),
        ("*.md\n!README.md\n", ["a.md"], ["README.md"]),
        ("*.md\n!README*.md\nREADME-secret.md\n", ["a.md", "README-secret.md"], ["README-open.md"]),
        ("*\n!src\n", ["a", "b/c"], ["src", "src/a"]),
        ("a/**/z\n", ["a/z", "a/b/c/z"], ["b/z", "a/zz"]),
        ("[a-c].txt\n[^x]1\n", ["b.txt", "y1"], ["d.txt", "x1"]),
        ("a\\*b\n", ["a*b"], ["axb"]),
        ("./a/../b\n.\n", ["b"], ["a"]),
        ("a.b+c\n", ["a.b+c"], ["aab+c", "a.bbc"]),
        ("**\n!keep/this\n", ["x", "keep/that"], ["keep/this"]),
    ],
)
def test_patterns_leave_out_what_docker_leaves_out(text: str, out: list[str], stays: list[str]) -> None:
    found = rules(text)
    assert [name for name in out if not left_out(name, found)] == []
    assert [name for name in stays if left_out(name, found)] == []


def test_a_class_that_is_not_closed_is_a_sentence_with_its_line() -> None:
    with pytest.raises(TaskError, match=r"^x/.dockerignore line 2: '\[a' is no pattern: '\[' is not closed"):
        rules("b\n[a\n", "x/.dockerignore")


NAMES = st.lists(st.text("ab.*", min_size=1, max_size=3), min_size=1, max_size=3).map("/".join)


@given(st.lists(NAMES), st.lists(NAMES))
def test_what_is_kept_is_some_of_it_in_order_and_nothing_without_patterns(
    names: list[str], patterns: list[str]
) -> None:
    assert kept(names, ()) == names
    found = rules("\n".join(patterns))
    stays = kept(names, found)
    assert [name for name in names if name in set(stays)] == stays
    # A member that stays has every folder of its own that is there.
    for name in stays:
        assert all(other in stays for other in names if name.startswith(f"{other}/"))
    # What was left out once is not there to be left out again.
    assert kept(stays, found) == stays
