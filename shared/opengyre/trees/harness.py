"""Profiles of harnesses: how the role of a call is told from its messages and headers. Data files, one a harness.

A rule names where it looks and what must be there, one of several texts; the first rule that holds decides. Where none
does, the role is not known here, and the shape of the tree tells it (`roles.structural`). A harness that is `linear`
has one agent and one history: what no rule knows is the main agent's.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Final, Literal, get_args

from opengyre.trees.calls import ROLES, Role

Where = Literal["system", "first_user", "last_user", "header"]
PROFILES: Final = ("claude-code", "codex", "openhands", "mini-swe-agent", "generic")


class ProfileError(ValueError):
    """A profile that is not as it must be; one sentence."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of a call's request."""

    system: str = ""
    first_user: str = ""
    last_user: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case."""


@dataclass(frozen=True, slots=True)
class Rule:
    role: Role
    where: Where
    contains: tuple[str, ...]
    """One of these must be there; the empty text is in everything that is there at all."""
    header: str = ""

    def holds(self, request: Request) -> bool:
        if self.where == "header":
            text = request.headers.get(self.header)
            return text is not None and any(part in text for part in self.contains)
        text = getattr(request, self.where)
        return bool(text) and any(part in text for part in self.contains)


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    rules: tuple[Rule, ...]
    user_agent: tuple[str, ...] = ()
    """How the header of its client begins, in lower case."""
    linear: bool = False

    def role(self, request: Request) -> Role | None:
        """The role of a call; None where its messages do not tell."""
        for rule in self.rules:
            if rule.holds(request):
                return rule.role
        return "main" if self.linear else None


def parse(text: str) -> Profile:
    """Read a profile; raises `ProfileError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"the profile is not valid TOML: {error}") from error
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ProfileError("name is missing; allowed is the name of a harness")
    if unknown := sorted(table.keys() - {"name", "user_agent", "linear", "rule"}):
        raise ProfileError(f"{name}: unknown field {unknown[0]}; allowed: name, user_agent, linear, rule")
    return Profile(
        name,
        tuple(_rule(name, number, rule) for number, rule in enumerate(table.get("rule", []))),
        tuple(agent.lower() for agent in table.get("user_agent", [])),
        bool(table.get("linear", False)),
    )


def _rule(name: str, number: int, rule: Mapping[str, object]) -> Rule:
    where, role, contains, header = (rule.get(key) for key in ("where", "role", "contains", "header"))
    place = f"{name}: rule {number}:"
    if role not in ROLES:
        raise ProfileError(f"{place} role is {role!r}; allowed: {', '.join(ROLES)}")
    if where not in get_args(Where):
        raise ProfileError(f"{place} where is {where!r}; allowed: {', '.join(get_args(Where))}")
    if not isinstance(contains, list) or not contains or not all(isinstance(part, str) for part in contains):
        raise ProfileError(f"{place} contains is {contains!r}; allowed is a list of texts")
    if (where == "header") != isinstance(header, str):
        raise ProfileError(f"{place} header is {header!r}; it names a header where `where` is 'header', and only there")
    return Rule(role, where, tuple(contains), str(header or "").lower())  # type: ignore[arg-type]  # checked above


@functools.cache
def load(name: str) -> Profile:
    """A profile that comes with OpenGyre; raises `ProfileError`."""
    if name not in PROFILES:
        raise ProfileError(f"harness is {name!r}; allowed: {', '.join(PROFILES)}")
    path = resources.files("opengyre.trees") / "profiles" / f"{name}.toml"
    return parse(path.read_text(encoding="utf-8"))


def detect(request: Request) -> Profile:
    """Whose call it is, by the client's name, else by a rule for the main agent's system prompt; else the generic
    profile."""
    agent = request.headers.get("user-agent", "").lower()
    profiles = [load(name) for name in PROFILES]
    for profile in profiles:
        if agent and any(agent.startswith(known) for known in profile.user_agent):
            return profile
    for profile in profiles:
        if any(rule.where == "system" and rule.holds(request) for rule in profile.rules):
            return profile
    return load("generic")
