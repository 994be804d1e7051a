"""What goes into a tree and what comes out of it: calls, and what became of each."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from opengyre.trees.blocks import Tokens
from opengyre.trees.keys import Rows
from opengyre.trees.trie import Position

Role = Literal["main", "main-summary", "sub-agent", "sub-agent-summary"]
ROLES: Final[tuple[Role, ...]] = ("main", "main-summary", "sub-agent", "sub-agent-summary")
"""The highest first."""

Kind = Literal["root", "extend", "branch", "compaction", "realign", "fork", "retry"]
"""How a call stands to what was before it. `extend`: its prompt begins with all of another call. `branch`: a context of
its own (a sub-agent, a parallel call). `compaction`: a history that a summary replaced. `realign`: the same history in
other tokens (the template, retokenisation). `fork`: a history that was rewritten, or taken back to the end of a call
that its agent had gone on from already. `retry`: the prompt of another call again. `root`: there is nothing before
it."""

Diagnosis = Literal["template", "retokenisation", "edit"]


def base(role: Role | None) -> Role:
    """The role whose history a summary sums up; of any other, itself."""
    if role is None or role == "main-summary":
        return "main"
    return "sub-agent" if role == "sub-agent-summary" else role


MAX_TOKEN: Final = 2**31 - 1


class BadTokensError(ValueError):
    """Token ids that are no ids."""


def ids(tokens: "Tokens | Sequence[int]", most: int = MAX_TOKEN) -> Tokens:
    """As an array; raises `BadTokensError` unless all are whole numbers from 0 to `most`, which is below 2**31."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32:
        found = tokens
    else:
        try:
            # Of a sequence of Python's integers this is the fastest way to an array.
            found = np.frombuffer(array("i", tokens), dtype=np.int32) if len(tokens) else np.empty(0, np.int32)
        except (TypeError, OverflowError) as error:
            raise BadTokensError(f"token ids are not whole numbers from 0 to {most}") from error
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) <= most:
        raise BadTokensError(f"token ids are not whole numbers from 0 to {most}")
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """A call as it was seen. Its prompt is either whole, or what follows `prefix` tokens of its parent."""

    call: str
    """Identifier, unique in the tree."""
    prompt: Tokens | Sequence[int]
    sampled: Tokens | Sequence[int]
    parent: str | None = None
    """The call that it declares to go on from. With a whole prompt it is looked at first, and verified."""
    prefix: int | None = None
    """How many leading tokens of the parent's prompt and completion come before `prompt`. None: `prompt` is whole."""
    order: int = 0
    """Place in the log; calls of one place are ordered by their ids."""
    fault: str | None = None
    """Why its completion cannot be trained; it is context all the same."""
    role: Role | None = None
    """None: not known, which is as `main`."""
    kind: Kind | None = None
    """What it is known to be where it does not extend, from the format or the harness."""
    execution: str = ""
    """Calls of different executions share nodes and nothing else: neither is before the other."""
    agent: str = ""
    """Who asked, where that is known: of two agents that go on from one call neither takes the other's history back."""
    wanted: bool = False
    """One of several answers to a prompt that were all asked for: another does not supersede it."""
    adapter: str | None = None
    """The adapter that it was sampled under; None: none."""
    media: tuple[tuple[int, str], ...] = ()
    """Place on the path and hash of the images and such in its new tokens."""
    rows: Rows | None = None
    """The routes of experts that were recorded with it, where training is to replay them."""
    payload: object = None
    """Whatever else makes two deliveries equal."""


@dataclass(slots=True, eq=False)
class Node:
    """A call in its place. Two are the same if they are one object."""

    given: Given
    start: Position
    """Where its prompt ends and its completion begins."""
    end: Position
    parent: "Node | None" = None
    """The earlier call that it goes on from: the whole of it begins this prompt."""
    related: "Node | None" = None
    """The earlier call that shares most with it; `parent` where it extends."""
    kind: Kind = "root"
    offset: int = 0
    """How many tokens of its prompt are tokens of `related`: where it diverges."""
    diagnosis: Diagnosis | None = None
    """Why a `realign` or `fork` diverges."""
    summary: "Node | None" = None
    """Of a `compaction`: the call whose completion is carried over."""
    doubled: int = 0
    """How many tokens of its prompt, where it diverges, are those right before once more."""
    parent_missing: bool = False
    """It declared a parent that never came."""
    refused: str | None = None
    """Why it is not trained: its own fault, or `superseded` by another call of the same prompt."""
    children: "list[Node]" = field(default_factory=list)
    """Calls whose `parent` it is."""
    rows: tuple[Rows, ...] = ()
    """Routes of the tokens of its path, as far as they were recorded."""
    asked: object = None
    """What was asked, where it is not the place `start` that tells it: of two with rows of their own, the tokens."""

    @property
    def question(self) -> object:
        """Equal for two calls that asked the same."""
        return self.start if self.asked is None else self.asked

    @property
    def call(self) -> str:
        return self.given.call

    @property
    def role(self) -> Role:
        return self.given.role or "main"

    @property
    def events(self) -> int:
        """Sampled tokens."""
        return self.end.depth - self.start.depth

    @property
    def length(self) -> int:
        return self.end.depth


@dataclass(frozen=True, slots=True)
class Figures:
    """What a tree amounts to."""

    calls: int
    events: int
    """Tokens that were sampled, each call's."""
    path_tokens: int
    """Prompts and completions without sharing."""
    unique_nodes: int
    """Tokens at distinct prefixes."""
    leaves: int
    refused: dict[str, int]
    """Reason -> calls that are not trained."""
    transitions: dict[str, int]
    """Class -> calls; roots are none."""
    diagnoses: dict[str, int]
    doubled: int = 0
    """Calls whose prompt has a history twice."""

    @property
    def dedup_ratio(self) -> float:
        """How many times a token is repeated in the prompts; 1 where there is nothing."""
        return self.path_tokens / self.unique_nodes if self.unique_nodes else 1.0
