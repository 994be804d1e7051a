"""What an answer is, read from what was sampled for it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from opengyre.rollout.ask import Ask
from opengyre.rollout.prompt import Renderer
from opengyre.rollout.router import Completion
from opengyre.rollout.stops import before, cut


@dataclass(frozen=True)
class Answer:
    kept: Completion
    """What is kept of the completion: up to the stop string, or to the end of the only tool call."""
    stop: str | None
    text: str
    """Of the whole turn, what begins it included."""
    content: str | None
    """Beside the tool calls; None where there are none."""
    calls: tuple[tuple[str, str], ...]
    """Names and arguments."""


def ends_of(ask: Ask, renderer: Renderer) -> tuple[str, ...]:
    """What ends an answer: the stop strings, and the end of a tool call where there may be one only."""
    single = bool(ask.tools) and ask.calls and (not ask.parallel or bool(ask.choice))
    return (*ask.stops, renderer.call_end) if single else ask.stops


def read(ask: Ask, whole: Completion, opening: Sequence[int], renderer: Renderer) -> Answer:
    """`opening`: the tokens that begin the turn and were not sampled."""
    done, end = cut(whole, ends_of(ask, renderer), renderer.decode)
    stop = end if end in ask.stops else None
    turn = (*opening, *done.tokens)
    if end is not None:
        text = renderer.decode(turn)
        text = before(text, end) + ("" if stop is not None else end)
    elif ask.api == "completions":
        text = renderer.decode(turn)
    else:
        text = renderer.completion_text(turn)
    if ask.api != "completions":
        text = text.strip()
    if ask.calls and ask.tools and done.finish == "stop":
        said = renderer.read_turn(text, ask.tools, ask.choice)
        if said.calls:
            return Answer(done, stop, text, said.content, said.calls)
    return Answer(done, stop, text, None, ())
