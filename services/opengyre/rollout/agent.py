"""The agents as programs: clients of their execution's endpoint, like any agent.

They never see a token id. A request that got no answer is sent again as it was; the endpoint answers it from the log
if it was served. An endpoint that fails, or has no room now, is asked until the episode's time budget ends.

Awaits: a model call is woken by its answer, or sent again after `ASK_S` (it then joins the one under way); a command
by its result.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec

from opengyre.proto.episode import EpisodeDispatch
from opengyre.rollout import synthetic
from opengyre.rollout.ask import LANE_HEADER
from opengyre.rollout.episode import AgentEnded
from opengyre.rollout.messages import answer
from opengyre.rollout.shell import Ask, Continue, Execute, Part, Step, decide

log = logging.getLogger("gyre.rollout.agent")

ASK_S = 300.0


class Agent(Protocol):
    """What works on a task until it ends by itself, or goes on as several lanes."""

    async def run(self) -> AgentEnded | Part: ...


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None

    @property
    def said(self) -> str:
        """The text of a chat's or a text's completion."""
        return (self.text if self.message is None else self.message.content) or ""


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | None = None
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _ErrorBody = field(default_factory=_ErrorBody)  # type: ignore[assignment]  # the factory's type is the field's own


_encoder = msgspec.json.Encoder()
_completions = msgspec.json.Decoder(_Completion)
_refusals = msgspec.json.Decoder(_Refusal)


class CallRefusedError(Exception):
    """The endpoint refuses the call, with OpenAI's error code; `param` is the budget that is spent."""

    def __init__(self, message: str, code: str | None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True)
class ChatClient:
    """An OpenAI client of the least kind."""

    session: aiohttp.ClientSession
    url: str
    key: str
    model: str
    lane: int | None = None
    """Whose calls they are."""

    async def ask(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> str:
        """The assistant's text; raises `CallRefusedError`."""
        return await self._post("chat/completions", {"messages": messages, "max_tokens": max_tokens})

    async def complete(self, text: str, stop: str, max_tokens: int) -> str:
        """What the model goes on with, up to the stop string; raises `CallRefusedError`."""
        return await self._post("completions", {"prompt": text, "stop": [stop], "max_tokens": max_tokens})

    async def _post(self, path: str, fields: dict[str, Any]) -> str:
        body = _encoder.encode({"model": self.model, **fields})
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        if self.lane is not None:
            headers[LANE_HEADER] = str(self.lane)
        for attempt in itertools.count():
            try:
                async with self.session.post(
                    f"{self.url}/{path}",
                    data=body,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=ASK_S),
                ) as response:
                    content = await response.read()
                    if response.status == 200:
                        return _completions.decode(content).choices[0].said
                    # Another lane's calls may hold what is left of a budget, and give some of it back.
                    if response.status < 500 and response.headers.get("x-should-retry") != "true":
                        error = _refusals.decode(content).error
                        raise CallRefusedError(error.message, error.code, error.param)
                    log.info("the endpoint answered %d: %s", response.status, content[:200])
            except (aiohttp.ClientError, TimeoutError) as error:
                log.info("the endpoint did not answer: %r", error)
            await asyncio.sleep(min(0.05 * 2 ** min(attempt, 6), 2.0))
        raise AssertionError


Run = Callable[[int, str], Awaitable[str]]
"""Run a turn's command in the sandbox; what the agent sees of it."""


def refused(error: CallRefusedError) -> AgentEnded:
    """The end of an agent whose call is refused."""
    if error.code == "context_length_exceeded":
        return AgentEnded("overflow", str(error))
    if error.code == "insufficient_quota":
        return AgentEnded("token_budget" if error.param == "token_budget" else "turn_budget", str(error))
    return AgentEnded("agent_error", str(error))


@dataclass(frozen=True)
class ShellAgent:
    dispatch: EpisodeDispatch
    client: ChatClient
    run_command: Run
    steps: list[Step]
    lane: int | None = None

    async def run(self) -> AgentEnded | Part:
        """Its end, or where the trunk goes on as lanes."""
        while True:
            match decide(self.dispatch, self.steps, self.lane):
                case AgentEnded() | Part() as end:
                    return end
                case Execute(turn, command):
                    seen = await self.run_command(turn, command)
                    self.steps[turn] = Step(self.steps[turn].command, seen)
                case Ask() | Continue() as wanted:
                    try:
                        text = await self._say(wanted, self.dispatch.harness.max_tokens)
                    except CallRefusedError as error:
                        return refused(error)
                    self.steps.append(Step(text, None))

    async def _say(self, wanted: Ask | Continue, max_tokens: int) -> str:
        if isinstance(wanted, Ask):
            return await self.client.ask(wanted.messages, max_tokens)
        return await self.client.complete(wanted.text, wanted.stop, max_tokens)


@dataclass(frozen=True)
class SyntheticAgent:
    """Makes one call after another, of the drawn lengths. `answers` are those of the calls made so far."""

    dispatch: EpisodeDispatch
    client: ChatClient
    answers: list[str]

    async def run(self) -> AgentEnded:
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.dispatch.task.instruction}]
        for turn, tokens in enumerate(synthetic.lengths(self.dispatch)):
            if turn < len(self.answers):
                text = self.answers[turn]
            else:
                try:
                    text = await self.client.ask(messages, tokens)
                except CallRefusedError as error:
                    return refused(error)
            messages += [answer(text), {"role": "user", "content": synthetic.NEXT}]
        return AgentEnded("done")
