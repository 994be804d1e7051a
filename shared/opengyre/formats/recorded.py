"""Our own TRAJ stream, as `gyre stream replay TRAJ --out FILE` writes it, or bare events, one a line. Pure.

Token ids with the declared parent and prefix, for every execution that is in the file. A line that is no event of ours
is counted: where it was a call, its place in the log is empty.
"""

from collections.abc import Iterator

import msgspec

from opengyre.formats.model import LogCall, Notes, Source, message
from opengyre.formats.values import decoded, obj
from opengyre.proto import codec
from opengyre.proto.traj import Call


def recorded(source: Source, notes: Notes) -> Iterator[LogCall]:
    """Calls of every execution."""
    for _, line in source.lines():
        entry = obj(decoded(line))
        event = entry.get("event", entry)
        try:
            call = codec.decode(msgspec.json.encode(event))
        except codec.UndecodableError:
            notes.warn("a line is no event of a release that is known")
            continue
        if isinstance(call, Call):
            yield log_call(call)
        else:
            notes.ignored[str(obj(event).get("type"))] += 1


def log_call(call: Call) -> LogCall:
    """A call of our stream in the common form."""
    return LogCall(
        call=call.call,
        execution=call.execution,
        group=call.group,
        parent=call.parent,
        prefix=call.prefix_tokens,
        answer=(message("assistant", [("text", call.text)]),),
        prompt_ids=call.prompt_ids,
        sampled_ids=call.sampled_ids,
        logprobs=call.logprobs,
        role=call.role,
        wanted=call.choices > 1,
    )
