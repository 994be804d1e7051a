"""Logs of other systems, and our own, as trees. Pure: bytes in, figures out; the caller reads files."""

from opengyre.formats.detect import READERS, detect
from opengyre.formats.forest import Encode, Forest
from opengyre.formats.model import LogCall, Message, Notes, Source, message
from opengyre.formats.report import CallRow, Refused, TreeReport, read_tree
from opengyre.formats.values import FormatError

__all__ = [
    "READERS",
    "CallRow",
    "Encode",
    "Forest",
    "FormatError",
    "LogCall",
    "Message",
    "Notes",
    "Refused",
    "Source",
    "TreeReport",
    "detect",
    "message",
    "read_tree",
]
