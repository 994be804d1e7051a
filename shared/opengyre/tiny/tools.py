"""Tool calls of the tiny policy: how tools are told to it, and what of its text is a call. Pure.

Its turn is one shell command. So where a tool is offered that runs one (its only required argument is the text
`command`), that tool is not described to it, and its turn is a call of this tool. Other tools are described before the
conversation, and it calls them as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times in a
turn. Such arguments are the bytes that were sampled.

Where a request forces a call (`choice`: a tool's name, or `ANY`), the turn is begun for the policy (`opening`); what it
makes of that is its own. A forced shell tool needs no beginning: then the turn is the command, whatever it is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
ANY: Final = ""
"""Some tool, whichever."""
DONE: Final = "done"
"""The tiny policy's word for the end of its work: no command."""
_BLOCK: Final = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)

Tool = Mapping[str, Any]
"""`{"name": ..., "description": ..., "parameters": JSON Schema}`."""


class _Block(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_blocks = msgspec.json.Decoder(_Block)


@dataclass(frozen=True, slots=True)
class Said:
    """A completion's text: what is content, and the calls (name, arguments as JSON text)."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()


def shell_tool(tools: Sequence[Tool]) -> str | None:
    """Name of the first tool that runs a shell command."""
    for tool in tools:
        parameters = tool.get("parameters") or {}
        command = (parameters.get("properties") or {}).get("command") or {}
        if command.get("type") == "string" and set(parameters.get("required") or ()) <= {"command"}:
            return tool["name"]
    return None


def prompt_of(tools: Sequence[Tool]) -> str:
    """What is said of the tools in front of the conversation; empty where nothing has to be."""
    shell = shell_tool(tools)
    told = [json.dumps(dict(tool), sort_keys=True, ensure_ascii=False) for tool in tools if tool["name"] != shell]
    if not told:
        return ""
    return "\n".join([f'call tools as {OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE}:', *told])


def opening(tools: Sequence[Tool], choice: str) -> str:
    """How a turn begins that is to call `choice`; empty where nothing has to be put there."""
    shell = shell_tool(tools)
    if choice == shell or (choice == ANY and shell is not None):
        return ""
    name = choice or (tools[0]["name"] if len(tools) == 1 else "")
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": ' if name else f'{OPEN}{{"name": '


def settled(text: str, tools: Sequence[Tool], choice: str | None = None) -> str:
    """The beginning of a turn's content that no further text changes; `text` is the turn's beginning."""
    if not tools:
        return text.strip()
    if choice is not None or shell_tool(tools) is not None:
        return ""
    at = text.find(OPEN)
    if at < 0:
        at = next(len(text) - n for n in range(len(OPEN) - 1, -1, -1) if text.endswith(OPEN[:n]))
    return text[:at].strip()


def read(text: str, tools: Sequence[Tool], choice: str | None = None) -> Said:
    """What the policy said, where these tools were offered and `choice` was forced. Text that is no call, though it
    looks like one, is text."""
    text = text.strip()
    shell = shell_tool(tools)
    if choice is not None and shell is not None and choice in (ANY, shell):
        if choice == shell or not _BLOCK.search(text):
            return Said("", ((shell, json.dumps({"command": text}, ensure_ascii=False)),))
    elif choice is not None:
        shell = None
    if not tools or not text:
        return Said(text)
    if _BLOCK.search(text):
        return calls_in(text) or Said(text)
    if shell is None or text == DONE:
        return Said(text)
    return Said("", ((shell, json.dumps({"command": text}, ensure_ascii=False)),))


def calls_in(text: str) -> Said | None:
    """The text with its `<tool_call>` blocks as calls; None where there are none, or one that is no call."""
    found = list(_BLOCK.finditer(text))
    try:
        blocks = [_blocks.decode(match.group(1)) for match in found]
    except msgspec.DecodeError:
        return None
    if not found or not all(bytes(block.arguments).startswith(b"{") for block in blocks):
        return None
    calls = tuple((block.name, bytes(block.arguments).decode()) for block in blocks)
    return Said(_BLOCK.sub("", text).strip(), calls)


def written(content: str, calls: Sequence[Any], where: str) -> str:
    """The text of an assistant's turn that made these calls (OpenAI's shape); raises `ValueError` naming `where`."""
    pairs = [_pair(call, where) for call in calls]
    if len(pairs) == 1 and not content.strip():
        command = _command(pairs[0][1])
        if command is not None:
            return command
    blocks = [f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{CLOSE}' for name, arguments in pairs]
    return "\n".join([*([content.strip()] if content.strip() else []), *blocks])


def _pair(call: Any, where: str) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function if isinstance(function, Mapping) else {}
    match given.get("name"), given.get("arguments"):
        case str(name), str(arguments):
            return name, arguments
    raise ValueError(f"{where}: a tool call must have function.name and function.arguments, which are strings")


def _command(arguments: str) -> str | None:
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    if isinstance(given, dict) and set(given) == {"command"} and isinstance(given["command"], str):
        return given["command"]
    return None
