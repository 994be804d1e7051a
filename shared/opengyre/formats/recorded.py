"""Our own TRAJ stream, as `gyre stream replay TRAJ --out FILE` writes it, or bare events, one a line. Pure.

Token ids with the declared parent and prefix, for every execution that is in the file. A line that is no event of ours
is counted: where it was a call, its place in the log is empty.
"""

import contextlib
from collections.abc import Iterator

import msgspec

from opengyre.formats.model import LogCall, Notes, Source, message
from opengyre.formats.values import decoded, obj
from opengyre.proto import codec
from opengyre.proto.traj import Call, unpack


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
            yield log_call(_filled(call, source))
        else:
            notes.ignored[str(obj(event).get("type"))] += 1


def _filled(call: Call, source: Source) -> Call:
    """With its ids, where they are a blob that lies beside; its name is its reference."""
    if call.bulk is not None and (content := source.beside(call.bulk.blob)) is not None:
        with contextlib.suppress(msgspec.DecodeError):
            return unpack(call, content)
    return call


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
        refused="blob_missing" if call.bulk is not None else None,
    )
