"""``.dockerignore``: which members of a build context it leaves out. Pure.

The rules are Docker's (its reference of ``.dockerignore`` files): a pattern stands for a path from the context's root
and for all below it; ``*`` and ``?`` stop at a slash, ``**`` does not; ``!`` takes back in; the last pattern that fits
decides. They are not git's, whose patterns without a slash fit at any depth: libraries for those decide otherwise.
"""

import posixpath
import re
from collections.abc import Iterable, Sequence

from opengyre.tasks.errors import TaskError

NAMES = ("Dockerfile.dockerignore", ".dockerignore")
"""Where it may be, the first one first."""

Rules = Sequence[tuple[re.Pattern[str], bool]]
"""Patterns with whether they leave out, in their order."""


def rules(text: str, place: str = ".dockerignore") -> Rules:
    """The patterns of a file; raises `TaskError` for one that is none."""
    found = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        out = not pattern.startswith("!")
        pattern = posixpath.normpath(pattern[0 if out else 1 :].strip()).lstrip("/")
        if pattern in ("", "."):
            continue  # as Docker: the root itself is never left out
        try:
            found.append((re.compile(_expression(pattern)), out))
        except (re.error, ValueError) as error:
            raise TaskError(f"{place} line {number}: {line.strip()[:80]!r} is no pattern: {error}") from error
    return found


def left_out(name: str, found: Rules) -> bool:
    """Whether a member, named from the root, is left out: by itself or with a folder that it is in."""
    parts = name.strip("/").split("/")
    names = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    decided = False
    for pattern, out in found:
        if out != decided and any(pattern.fullmatch(each) for each in names):
            decided = out
    return decided


def kept(names: Iterable[str], found: Rules) -> list[str]:
    """The names that stay. A folder stays where something in it does."""
    every = list(names)
    if not found:
        return every
    staying = {name for name in every if not left_out(name, found)}
    above = {"/".join(name.split("/")[:depth]) for name in staying for depth in range(1, name.count("/") + 1)}
    return [name for name in every if name in staying or name in above]


def _expression(pattern: str) -> str:
    made: list[str] = []
    place = 0
    while place < len(pattern):
        sign = pattern[place]
        place += 1
        if pattern.startswith("**", place - 1):
            place += 1
            if pattern.startswith("/", place):
                place += 1
                made.append("(?:.*/)?")
            else:
                made.append(".*")
        elif sign == "*":
            made.append("[^/]*")
        elif sign == "?":
            made.append("[^/]")
        elif sign == "[":
            end = pattern.find("]", place + 1)
            if end < 0:
                raise ValueError("'[' is not closed by ']'")
            within = pattern[place:end]
            place = end + 1
            negated = within.startswith("^")
            made.append(f"[{'^/' if negated else ''}{_class(within[negated:])}]")
        elif sign == "\\" and place < len(pattern):
            made.append(re.escape(pattern[place]))
            place += 1
        else:
            made.append(re.escape(sign))
    return "".join(made)


def _class(within: str) -> str:
    """The inside of a class of signs: ranges stay, the rest means itself."""
    return "".join(sign if sign == "-" else re.escape(sign) for sign in within.replace("\\", ""))
