"""Which sandboxes are meant by the options of `gyre sandbox`, and how long a time is in words. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opengyre.cli.stack import StackError
from opengyre.proto.sandbox import SandboxInfo

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


@dataclass(frozen=True)
class Wanted:
    """Sandboxes with all of `labels`, of `owner`, at least `older_s` old."""

    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str | None = None
    older_s: float = 0.0

    def takes(self, info: SandboxInfo) -> bool:
        """Whether it is meant."""
        carries = all(info.labels.get(key) == text for key, text in self.labels.items())
        return carries and self.owner in (None, info.owner) and info.age_s >= self.older_s


def labels(given: Sequence[str] | None) -> dict[str, str]:
    """`KEY=VALUE` each; raises `StackError` for what is none."""
    found = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise StackError(f"--label is {text!r}; allowed is KEY=VALUE")
        found[key] = value
    return found


def seconds(text: str) -> float:
    """A span of time such as `90s` or `1.5h`, in seconds."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise StackError(f"--older-than is {text!r}; allowed is a number with s, m, h or d, like 90s or 2h")
    return float(match[1]) * UNITS[match[2]]


def wanted(given: Mapping[str, str], owner: str | None, older_than: str | None, every: bool) -> Wanted | None:
    """What is to be removed; None where no option says which."""
    if every and (given or owner is not None or older_than is not None):
        raise StackError("--all is given beside --label, --owner or --older-than; allowed is one of the two")
    if not (every or given or owner is not None or older_than is not None):
        return None
    return Wanted(dict(given), owner, 0.0 if older_than is None else seconds(older_than))


def age(span_s: float) -> str:
    """A span in its two largest units: `2 h 05 m`, `3 m 20 s`, `4.2 s`."""
    if span_s < 60:
        return f"{max(span_s, 0.0):.1f} s"
    for unit, size, below, small in (("d", 86_400, 3600, "h"), ("h", 3600, 60, "m"), ("m", 60, 1, "s")):
        if span_s >= size:
            return f"{int(span_s // size)} {unit} {int(span_s % size // below):02d} {small}"
    raise AssertionError("a minute or more has a unit")
