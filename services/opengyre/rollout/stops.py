"""Where a stop string ends a completion. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from opengyre.proto.traj import VersionSpan
from opengyre.rollout.router import Completion

Decode = Callable[[Sequence[int]], str]


def cut(done: Completion, stops: Sequence[str], decode: Decode) -> tuple[Completion, str | None]:
    """`done` up to the token with which the first stop string is complete, and that string; as it is where none is.

    What was sampled after it is thrown away: no one sees it, and nothing depends on it.
    """
    if not any(stop in decode(done.tokens) for stop in stops):
        return done, None

    def found(count: int) -> str | None:
        text = decode(done.tokens[:count])
        places = [(text.index(stop), stop) for stop in stops if stop in text]
        return min(places)[1] if places else None

    low, high = 1, len(done.tokens)
    while low < high:
        middle = (low + high) // 2
        if found(middle) is None:
            low = middle + 1
        else:
            high = middle
    versions = tuple(
        VersionSpan(version=span.version, start=span.start, end=min(span.end, low))
        for span in done.versions
        if span.start < low
    )
    kept = replace(done, tokens=done.tokens[:low], logprobs=done.logprobs[:low], versions=versions, finish="stop")
    return kept, found(low)


def before(text: str, stop: str | None) -> str:
    """The text that stands before the stop string."""
    return text if stop is None else text.partition(stop)[0]
