"""Logs of other systems for tests: small ones of our own, and (where there are any) real ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opengyre.formats import Forest, Source, TreeReport, read_tree

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Where real logs are looked for unless GYRE_TEST_DATA says otherwise: beside the repository."""
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "trajectories"


def source(path: Path) -> Source:
    """The log with the files beside it, by their exact name or with the log's own prefix."""
    return Source(path.name, path.read_bytes(), _beside(path))


def _beside(path: Path) -> Callable[[str], bytes | None]:
    def read(name: str) -> bytes | None:
        prefix = path.name.removesuffix("trajectory.json") if path.name.endswith("trajectory.json") else ""
        places = (path.parent / name, path.parent / f"{prefix}{name}")
        return next((place.read_bytes() for place in places if place.is_file()), None)

    return read


def report(name: str, forest: Forest | None = None) -> TreeReport:
    """The tree of one of our own small logs."""
    return read_tree(source(FIXTURES / name), forest or Forest(), per_call=True)


def real(name: str) -> Path:
    """A real log; the test is skipped where there is none."""
    folder = Path(os.environ.get("GYRE_TEST_DATA") or BESIDE)
    if not folder.is_dir():
        pytest.skip(f"there are no real trajectories in {folder}; GYRE_TEST_DATA names another folder")
    for root in (folder / "trajectories", folder):
        if (root / name).is_file():
            return root / name
    pytest.skip(f"{folder} has no {name}")
