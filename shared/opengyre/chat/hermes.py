"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Pure.

Text that is no call, though it looks like one, stays text; the arguments of a call are the bytes that were sampled.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from opengyre.tiny.tools import CLOSE, OPEN, Said, Tool, calls_in

_PROMPT: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def functions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in OpenAI's shape, as templates take them."""
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def prompt_of(tools: Sequence[Tool]) -> str:
    """What a system prompt says of the tools; empty where there are none."""
    if not tools:
        return ""
    told = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in functions(tools))
    return _PROMPT.format(tools=told)


def opening(tools: Sequence[Tool], choice: str) -> str:
    """How a turn begins that is to call the tool `choice`, or some tool where that is empty."""
    name = choice or (tools[0]["name"] if len(tools) == 1 else "")
    begin = f'{OPEN}\n{{"name": '
    return f'{begin}{json.dumps(name, ensure_ascii=False)}, "arguments": ' if name else begin


def settled(text: str, tools: Sequence[Tool], choice: str | None = None) -> str:
    """The beginning of a turn's content that no further text changes; `text` is the turn's beginning."""
    if not tools:
        return text.strip()
    if choice is not None:
        return ""
    at = text.find(OPEN)
    if at < 0:
        at = next(len(text) - n for n in range(len(OPEN) - 1, -1, -1) if text.endswith(OPEN[:n]))
    return text[:at].strip()


def read(text: str, tools: Sequence[Tool]) -> Said:
    """What was said, where these tools were offered."""
    text = text.strip()
    return (calls_in(text) if tools else None) or Said(text)


def arguments_of(text: Any) -> Any:
    """A call's arguments as templates take them: the object that the JSON text is; any other text as it is."""
    if not isinstance(text, str):
        return text
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, dict) else text


def written(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of a turn that made these calls (names and argument texts in OpenAI's shape)."""
    blocks = []
    for call in calls:
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        blocks.append(f'{OPEN}\n{{"name": {name}, "arguments": {call["function"]["arguments"]}}}\n{CLOSE}')
    return "\n".join([*([content.strip()] if content.strip() else []), *blocks])
