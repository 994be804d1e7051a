"""What an artifact's patterns leave behind."""

import pytest

from opengyre.tasks.carrying import excluded


@pytest.mark.parametrize(
    ("name", "patterns", "out"),
    [
        ("a/b.pyc", ["*.pyc"], True),
        ("a/b.py", ["*.pyc"], False),
        ("node_modules/x/y", ["node_modules"], True),
        ("a/node_modules/x", ["node_modules/"], True),
        ("a/.git", [".git"], True),
        ("a/.gitignore", [".git"], False),
        ("src/build/x", ["src/build"], True),
        ("a/src/build", ["/src/build"], False),
        ("x", [], False),
    ],
)
def test_a_pattern_fits_a_member_or_a_folder_that_it_is_in(name: str, patterns: list[str], out: bool) -> None:
    assert excluded(name, patterns) is out
