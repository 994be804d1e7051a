"""The trees of a log: one an execution, and what they amount to together. Pure.

The unit is that of the first call that can be used: token ids where the log has them, else messages (each message
stands for one node). With `encode` a log of messages is a tree of tokens: every message is rendered by itself
(`<|im_start|>role`, its text, `<|im_end|>`), so that equal messages are equal tokens whatever the model's own template.

Calls of different executions are never each other's history. What they share is counted all the same: `unique_nodes`
is over all executions, since equal prefixes are computed once.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from opengyre.formats.model import LogCall, Message, visible
from opengyre.trees import Builder, Given, Kind, Role, Texts, Tree
from opengyre.trees.calls import base

LOGPROB_CEILING = 1e-4
"""A log-prob above this is none; rounding may leave one slightly above 0."""
Encode = Callable[[str], Sequence[int]]


@dataclass(slots=True)
class _Execution:
    builder: Builder
    lengths: dict[str, int] = field(default_factory=dict)
    """Call -> its prompt and answer, in units."""
    agents: dict[str, str] = field(default_factory=dict)
    """Call -> who asked."""
    places: dict[str, int] = field(default_factory=dict)
    """Call -> its place in the log, the first time."""
    roles: dict[str, Role | None] = field(default_factory=dict)
    """Call -> its role as far as the log tells it."""
    told: set[int] = field(default_factory=set)
    """Hashes of what each call's prompt and answer show."""
    paths: set[int] = field(default_factory=set)
    """Hashes of each call's prompt and answer."""
    starts: dict[int, tuple[str, Role]] = field(default_factory=dict)
    """Hash of a prompt -> who asked it last."""
    prefixes: set[int] = field(default_factory=set)
    """Hashes of all that begins a prompt or an answer."""
    answered: dict[int, set[int]] = field(default_factory=dict)
    """What is shown of a message of an answer -> hashes of the prompts that were so answered."""
    kinds: dict[str, Kind | None] = field(default_factory=dict)
    """Call -> what it is known to be, as told the first time."""


@dataclass(slots=True)
class Forest:
    """Takes a log's calls as they come; `report` at the end."""

    encode: Encode | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    """Of token ids, for telling apart why histories diverge."""
    special: frozenset[int] = frozenset()
    unit: str | None = None
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> calls that have no place in a tree."""
    refused_agents: Counter[str] = field(default_factory=Counter)
    executions: dict[str, _Execution] = field(default_factory=dict)
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _shown: list[int] = field(default_factory=list)
    """Number of a message -> number of what is shown of it without reasoning."""
    _assistant: set[int] = field(default_factory=set)
    """Numbers of messages that a model said."""
    _texts: dict[tuple[str, bytes], int] = field(default_factory=dict)
    _encoded: list[tuple[np.ndarray, int]] = field(default_factory=list)
    """Number of a message -> its tokens, and how many of them are the header."""
    _order: int = 0

    def add(self, call: LogCall) -> None:
        """Take a call; one that cannot be used is counted with its reason."""
        self._order += 1
        reason = call.refused
        if reason is None and self.unit is None:
            self.unit = "tokens" if call.has_tokens else "messages"
        if reason is None:
            reason = self._take(call)
        if reason is not None:
            self.refused[reason] += 1
            self.refused_agents[call.agent] += 1

    def _take(self, call: LogCall) -> str | None:
        texts = Texts(self.decode, self.special)
        if self.unit == "messages":
            texts = Texts(self._text, shortest=1)
        execution = self.executions.setdefault(call.execution, _Execution(Builder(texts)))
        prefix = self._prefix(execution, call)
        if prefix is None:
            return "parent_missing"
        if self.unit == "tokens":
            if call.prompt_ids is None or call.sampled_ids is None:
                return "no_token_ids"
            prompt, sampled = call.prompt_ids, call.sampled_ids
        else:
            prompt = [self._number(one) for one in call.prompt]
            sampled = [self._number(one) for one in call.answer if one.text or one.reasoning]
        if not len(sampled):
            return "empty_completion"
        if not len(prompt) and not prefix:
            return "empty_prompt"
        other: Role | None = "sub-agent" if call.agent != "main" else None
        if call.call not in execution.kinds:
            execution.kinds[call.call] = self._kind(execution, call, prompt, sampled)
        execution.builder.add(
            Given(
                call.call,
                prompt,
                sampled,
                call.parent,
                prefix if call.parent is not None else None,
                order=execution.places.setdefault(call.call, self._order),
                fault=self._fault(call, len(sampled)),
                role=execution.roles.setdefault(call.call, call.role or other),
                kind=execution.kinds[call.call],
                wanted=call.wanted,
                agent=call.agent,
            )
        )
        execution.lengths.setdefault(call.call, prefix + len(prompt) + len(sampled))
        execution.agents.setdefault(call.call, call.agent)
        return None

    def _kind(self, execution: _Execution, call: LogCall, prompt: Sequence[int], sampled: Sequence[int]) -> Kind | None:
        """What the call is, should it not extend: after a compaction, the same words with other reasoning, or a history
        in which the client tells an answer otherwise than it was given."""
        if call.after_compaction:
            return "compaction"
        if self.unit == "tokens" or call.parent is not None:
            return None
        told, path, same = 0, 0, False
        start, known, rewritten = 0, True, False
        who = (call.agent, base(call.role))
        for place, number in enumerate([*prompt, *sampled]):
            if place == len(prompt):
                start = path
            before, path, shown = path, hash((path, number)), self._shown[number]
            told = hash((told, shown))
            if place < len(prompt) and told in execution.told:
                same = path not in execution.paths
            if known and path not in execution.prefixes:
                known = False
                if place < len(prompt) and number in self._assistant and execution.starts.get(before) == who:
                    answers = execution.answered.get(shown, set())
                    same = same or before in answers
                    # The answer to another prompt, here, is a history that was cut or summed up.
                    rewritten = not answers
            execution.prefixes.add(path)
            if place >= len(prompt):
                execution.answered.setdefault(shown, set()).add(start)
        execution.starts[start] = who
        execution.told.add(told)
        execution.paths.add(path)
        return "realign" if same else "fork" if rewritten else None

    def _prefix(self, execution: _Execution, call: LogCall) -> int | None:
        if call.parent is None:
            return 0
        if call.prefix is not None:
            return call.prefix
        return execution.lengths.get(call.parent)

    def _fault(self, call: LogCall, sampled: int) -> str | None:
        if self.unit != "tokens":
            return None
        if call.logprobs is None:
            return "no_logprobs"
        if len(call.logprobs) != sampled:
            return "logprobs_length"
        return None if all(value <= LOGPROB_CEILING for value in call.logprobs) else "logprobs_value"

    def _number(self, one: Message) -> int:
        number = self._numbers.get(one.key)
        if number is None:
            number = self._numbers[one.key] = len(self._numbers)
            if one.role == "assistant":
                self._assistant.add(number)
            shown = visible(one).encode("utf-8", "replace")
            text = (one.role, hashlib.blake2b(shown, digest_size=16).digest())
            self._shown.append(self._texts.setdefault(text, len(self._texts)))
            if self.encode is not None:
                header = self.encode(f"<|im_start|>{one.role}\n")
                whole = [*header, *self.encode(f"{one.reasoning}{one.text}<|im_end|>\n")]
                self._encoded.append((np.asarray(whole, np.int32), len(header)))
        return number

    def _text(self, numbers: Sequence[int]) -> str:
        """What messages show, as a text of eight characters for each."""
        return "".join(f"{self._shown[number]:08x}" for number in numbers)

    def trees(self) -> dict[str, Tree]:
        """Execution -> its tree, in tokens where there is an encoder."""
        made = {name: execution.builder.tree() for name, execution in self.executions.items()}
        if self.unit == "messages" and self.encode is not None:
            return {name: self._in_tokens(tree) for name, tree in made.items()}
        return made

    def _in_tokens(self, tree: Tree) -> Tree:
        """The same calls over the tokens of their messages; each costs only what it adds to the call before it."""
        builder = Builder(Texts(self.decode, self.special))
        for node in tree.nodes:
            numbers = tree.tokens(node).tolist()
            asked = node.start.depth
            header = self._encoded[numbers[asked]][1] if asked < len(numbers) else 0
            shared = node.offset if node.related is not None else 0
            prefix = sum(len(self._encoded[number][0]) for number in numbers[:shared])
            answer = self._joined(numbers[asked:])
            builder.add(
                Given(
                    node.call,
                    np.concatenate([self._joined(numbers[shared:asked]), answer[:header]]),
                    answer[header:],
                    node.related.call if shared and node.related is not None else None,
                    prefix if shared else None,
                    order=node.given.order,
                    fault=node.given.fault,
                    role=node.given.role,
                    # As messages tell it; one that goes on from an older call may share more with a later one's tokens.
                    kind="fork" if node.kind in ("extend", "retry") else None if node.kind == "root" else node.kind,
                    wanted=node.given.wanted,
                    agent=node.given.agent,
                )
            )
        return builder.tree()

    def _joined(self, numbers: Sequence[int]) -> np.ndarray:
        pieces = [self._encoded[number][0] for number in numbers]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
