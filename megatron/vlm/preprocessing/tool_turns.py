"""Tools, calls and results of a record, in OpenAI's and in ShareGPT's (LLaMA-Factory, ms-swift) format.

    {"tools": [{"type": "function", "function": {"name": "look", ...}}],
     "messages": [{"role": "user", "content": "What is left of it?"},
                  {"role": "assistant", "reasoning_content": "I have to look.", "content": null,
                   "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{\\"at\\": 3}"}}]},
                  {"role": "tool", "content": "A cat."},
                  {"role": "assistant", "content": "A cat is."}]}

    {"tools": "[{\\"name\\": \\"look\\", ...}]",
     "conversations": [{"from": "human", "value": "What is left of it?"},
                       {"from": "function_call", "value": "{\\"name\\": \\"look\\", \\"arguments\\": {\\"at\\": 3}}"},
                       {"from": "observation", "value": "A cat."}, {"from": "gpt", "value": "A cat is."}]}

Both are read as the same: arguments may be JSON text, and tools without a `type` are functions.
"""

import json
from collections.abc import Mapping
from typing import Any

from megatron.vlm.data.templates import ChatTemplate
from megatron.vlm.data.turns import TOOL, Call, Message, as_json
from megatron.vlm.preprocessing.record_media import Senses
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.reading.document import decode


def tools_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON text of each tool of a record. Raises `Rejected` (malformed_line)."""
    tools = _read("'tools'", record.get("tools") or [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise Rejected("malformed_line", "'tools' is no list of objects, nor its JSON text")
    return tuple(
        _written("'tools'", tool if {"type", "function"} & set(tool) else {"type": "function", "function": tool})
        for tool in tools
    )


def calls_of(value: Any, where: str) -> tuple[Call, ...]:
    """Return tool calls, from an object, a list, or JSON text of either. Raises `Rejected` (malformed_line)."""
    said = _read(where, value)
    return tuple(_call(one, where) for one in (said if isinstance(said, list) else [said]))


def _call(said: Any, where: str) -> Call:
    function = said.get("function", said) if isinstance(said, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise Rejected("malformed_line", f"{where} is no call: an object with 'name' and 'arguments'")
    arguments = _read(where, function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise Rejected("malformed_line", f"{where}: 'arguments' of {name[:40]!r} are no object, nor its JSON text")
    _written(where, arguments)
    return Call(name, arguments)


def check_forms(messages: tuple[Message, ...], tools: tuple[str, ...], template: ChatTemplate, senses: Senses) -> None:
    """Raise `Rejected` (unsupported_field, unsupported_media) if the chat template does not support a message."""
    name, results = f"chat template {template.name!r}", [message for message in messages if message.role == TOOL]
    if not template.has_tools and (tools or results or any(message.calls for message in messages)):
        raise Rejected("unsupported_field", f"{name} has no form for tools, calls and tool turns")
    if not template.has_reasoning and any((message.reasoning or "").strip() for message in messages):
        raise Rejected("unsupported_field", f"{name} has no form for reasoning ('reasoning_content')")
    if any(senses.kinds_in(message.words) for message in results) and not template.shows_results:
        raise Rejected("unsupported_media", f"{name} has no form for images in tool turns")


def _read(where: str, value: Any) -> Any:
    """Decode a JSON text, return other values unchanged. Raises `Rejected` (malformed_line)."""
    if not isinstance(value, str):
        return value
    try:
        return decode(value.encode("utf-8", "surrogatepass"))
    except UserError as error:
        raise Rejected("malformed_line", f"{where}: {value[:40]!r} is {error}"[:250]) from error


def _written(where: str, value: Any) -> str:
    try:
        decode(json.dumps(value).encode())  # which bounds its depth
        return as_json(value)
    except (UserError, TypeError, RecursionError) as error:  # TypeError: of a table's cells, times and bytes
        raise Rejected("malformed_line", f"{where} cannot be written as JSON: {error}"[:250]) from error
