"""Whose call it is, where a log does not say: by the profiles of harnesses. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from opengyre.formats.model import Message
from opengyre.formats.values import obj, seq, string
from opengyre.trees import Role
from opengyre.trees.harness import Request, detect

SYSTEM = ("system", "developer")


def role_of(prompt: Sequence[Message], headers: Mapping[str, str]) -> Role | None:
    """The role that the profile of the call's harness tells; None where it does not."""
    users = [one.text for one in prompt if one.role == "user"]
    request = Request(
        system=next((one.text for one in prompt if one.role in SYSTEM), ""),
        first_user=users[0] if users else "",
        last_user=users[-1] if users else "",
        headers=headers,
    )
    return detect(request).role(request)


def headers_of(value: Any) -> dict[str, str]:
    """Headers by their names in lower case, from an object or (HAR) a list of names and values."""
    pairs = [(string(obj(one).get("name")), obj(one).get("value")) for one in seq(value)] or obj(value).items()
    return {name.lower(): text for name, text in pairs if isinstance(text, str)}
