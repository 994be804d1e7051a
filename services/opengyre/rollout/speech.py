"""What a client may be told of an answer before it is whole. Pure.

Invariants: what was said is a beginning of the recorded answer, whatever the policy says next; so characters whose
bytes are not all there, white space that may be stripped, what may become a stop string, and the markup of tool calls
are held back.
"""

from collections.abc import Callable, Sequence

from opengyre.proto.traj import Call
from opengyre.rollout.ask import ApiError, Ask
from opengyre.rollout.prompt import Renderer
from opengyre.rollout.reading import ends_of

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"
"""What the bytes of a character that is not complete are decoded as."""


class Text:
    """The text of tokens that come one after the other."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        """The last tokens that gave text, for a decoder that looks at what stands before, and those that follow."""
        self._given = 0
        """How many tokens of the window gave text."""
        self.text = ""

    def take(self, tokens: Sequence[int]) -> str:
        """The new text, which is empty while a character is not complete."""
        self._window += tokens
        now = self._decode(self._window)
        if now.endswith(UNFINISHED):
            return ""
        new = now[len(self._decode(self._window[: self._given])) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self.text += new
        return new


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(places) if places else None


def held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    most = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(most, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def content_of(call: Call) -> str:
    """What the client reads of a recorded answer, beside its tool calls."""
    return call.text if call.content is None else call.content


class Speech:
    """One answer, as far as it may be told."""

    def __init__(self, ask: Ask, renderer: Renderer, opening: Sequence[int] = ()) -> None:
        """`opening`: tokens that begin the answer."""
        self._ask = ask
        self._renderer = renderer
        self._text = Text(renderer.decode)
        self._text.take(opening)
        self._closes = tuple(end for end in ends_of(ask, renderer) if end not in ask.stops)
        """What ends the only tool call that there may be, and with it the answer; it is a part of that."""
        self.over = False
        """Whether a stop string or the end of the turn was met."""
        self._said = 0

    def take(self, tokens: Sequence[int]) -> str:
        """What may be said after these tokens, and could not be before."""
        if self.over:
            return ""
        ends = [at for at, token in enumerate(tokens) if token in self._renderer.stop_token_ids]
        self.over = bool(ends)
        self._text.take(tokens[: ends[0]] if ends else tokens)
        sure = self._sure(self._text.text)
        new = sure[self._said :]
        self._said = max(self._said, len(sure))
        return new

    def _sure(self, text: str) -> str:
        stops = self._ask.stops
        stop = first_stop(text, stops)
        close = first_stop(text, self._closes)
        self.over = self.over or stop is not None or close is not None
        if close is not None and (stop is None or close < stop):
            text = text[: close + len(self._closes[0])]
        else:
            text = text[:stop] if stop is not None else text[: len(text) - held(text, stops)]
        if self._ask.api == "completions":
            return text
        tools = self._ask.tools if self._ask.calls else ()
        return self._renderer.settled(text, tools, self._ask.choice)

    def rest(self, call: Call) -> str:
        """What is left to be said of the recorded answer."""
        content = content_of(call)
        if self._said > len(content):
            raise ApiError(500, "The stream went beyond the recorded answer.", kind="server_error")
        return content[self._said :]


class Watch:
    """Whether a call has said all that will be kept of it: a stop string, or the only tool call."""

    def __init__(self, ends: Sequence[str], decode: Decode) -> None:
        self._ends = ends
        self._text = Text(decode)
        self._most = max((len(end) for end in ends), default=1)

    def over(self, tokens: Sequence[int]) -> bool:
        if not self._ends:
            return False
        new = self._text.take(tokens)
        tail = self._text.text[-(len(new) + self._most) :]
        return any(end in tail for end in self._ends)
