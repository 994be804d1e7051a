"""Dead letters: list, show, send again, drop.

A letter is sent again by storing its message anew under its subject, with an identity of its own, and only then
dropped; a repetition after a fault is one message to the broker and nothing to idempotent consumers.
"""

import contextlib

import msgspec

from opengyre.cli.stack import StackError
from opengyre.proto import codec, subjects
from opengyre.proto.base import tag_of
from opengyre.proto.dlq import DeadLetter
from opengyre.shared.bus import Bus, Stored, message_at, page, reachable, remove

PAGE = 200


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    time: float
    letter: DeadLetter


def _letter(stored: Stored) -> Letter | None:
    with contextlib.suppress(codec.UndecodableError):
        event = stored.event()
        if isinstance(event, DeadLetter):
            return Letter(sequence=stored.sequence, time=stored.timestamp, letter=event)
    return None


async def letters(bus: Bus, stream: str | None, limit: int) -> list[Letter]:
    """The first `limit` letters, of one origin or of all."""
    async with reachable(bus):
        found = await page(bus, subjects.DLQ, subjects.dlq(stream or "*", "*"), limit=limit)
    return [letter for stored in found.messages if (letter := _letter(stored)) is not None]


async def letter_at(bus: Bus, sequence: int) -> Letter:
    """One letter; raises `StackError` when there is none."""
    async with reachable(bus):
        stored = await message_at(bus, subjects.DLQ, sequence)
    letter = _letter(stored) if stored is not None else None
    if letter is None:
        raise StackError(f"there is no dead letter {sequence}; `gyre stream dlq ls` lists them")
    return letter


async def requeue(bus: Bus, sequence: int) -> int:
    """Store the letter's message again and drop the letter; return the message's new sequence."""
    found = await letter_at(bus, sequence)
    letter = found.letter
    async with reachable(bus):
        original = await message_at(bus, letter.origin_stream, letter.origin_sequence)
    payload = original.payload if original is not None else letter.payload.encode()
    try:
        kind = tag_of(codec.decode(payload))
    except codec.UndecodableError as error:
        raise StackError(
            f"letter {sequence} cannot be sent again: its message is no event ({error}); drop it"
        ) from error
    message_id = f"requeue-{letter.event_id()}-{sequence}"
    async with reachable(bus, 30):
        stored = await bus.publish_raw(letter.origin_subject, payload, message_id, kind)
        await remove(bus, subjects.DLQ, sequence)
    return stored


async def drop(bus: Bus, sequence: int) -> None:
    """Forget a letter; raises `StackError` when there is none."""
    await letter_at(bus, sequence)
    async with reachable(bus):
        await remove(bus, subjects.DLQ, sequence)
