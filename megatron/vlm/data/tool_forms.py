"""How chat templates write tools, tool calls, results and reasoning: the families' forms, as data.

HERMES (Qwen2.5, Qwen3)    <tool_call>
                           {"name": "look", "arguments": {"at": 3}}
                           </tool_call>
PARAMETERS (Qwen3.5, 3.6)  <tool_call>
                           <function=look>
                           <parameter=at>
                           3
                           </parameter>
                           </function>
                           </tool_call>
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One tool call of the assistant."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def texts(self) -> tuple[str, str]:
        """Name, and arguments as JSON."""
        return self.name, as_json(self.arguments)


def as_json(value: Any) -> str:
    """JSON as transformers' chat templates write it: not escaped, keys in order."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The text around tools, calls and results; calls, and results, are separated by newlines."""

    offer: tuple[str, str]
    """Before and after the tools, which are one line of JSON each."""
    call: Callable[[Call], str]
    result: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")
    offers_first: bool = False
    """Tools come before the system message, not after it."""
    gap: str = "\n"
    """Between the assistant's words and its first call."""
    pictures: bool = True
    """A result may hold images and videos."""

    def offered(self, tools: Sequence[str], system: str | None) -> str:
        """The system message (None: there is none) with tools (JSON texts)."""
        before, after = self.offer
        written = before + "".join(f"\n{tool}" for tool in tools) + after
        if system is None or (self.offers_first and not system):
            return written
        return f"{written}\n\n{system}" if self.offers_first else f"{system}\n\n{written}"

    def called(self, words: str, calls: Sequence[Call]) -> str:
        """The calls, to be appended to the assistant's words."""
        return (self.gap if words and calls else "") + "\n".join(map(self.call, calls))

    def returned(self, words: str) -> str:
        """A tool's result as the text of a user turn."""
        return self.result[0] + words + self.result[1]

    def is_result(self, words: str) -> bool:
        """Whether a user's words are a result in this form, and so not a question."""
        return words.startswith(self.result[0].rstrip()) and words.endswith(self.result[1].lstrip())


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning before the assistant's words, after the user's last question: `<think>\\n...\\n</think>\\n\\n`."""

    always: bool
    """Every answer after that question has the tags; else only the last one and those with reasoning."""
    stripped: str | None
    """Characters stripped from both ends of the reasoning; None: white space."""
    around: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    earlier: bool = False
    """Earlier answers have the tags too, empty."""

    def written(self, reasoning: str, words: str) -> str:
        """The reasoning in its tags, and the words."""
        before, after = self.around
        words = words.strip() if self.earlier else words.lstrip("\n")
        return before + reasoning.strip(self.stripped) + after + words


def _as_object(call: Call) -> str:
    name, arguments = call.texts
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _by_parameters(value_of: Callable[[Any], str]) -> Callable[[Call], str]:
    def written(call: Call) -> str:
        given = call.arguments.items()
        parameters = (f"<parameter={name}>\n{value_of(value)}\n</parameter>\n" for name, value in given)
        return f"<tool_call>\n<function={call.name}>\n{''.join(parameters)}</function>\n</tool_call>"

    return written


def _json_but_texts(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _json_of_several(value: Any) -> str:
    """As Qwen3.5's template does: lists and objects as JSON, other values as Python prints them (True, None)."""
    return as_json(value) if isinstance(value, dict | list) else str(value)


HERMES = ToolForm(
    offer=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>",
    ),
    call=_as_object,
)
PARAMETERS = ToolForm(
    offer=(
        "# Tools\n\nYou have access to the following functions:\n\n<tools>",
        "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
        "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but "
        "NOT after\n- If there is no function call available, answer the question like normal with your current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>",
    ),
    call=_by_parameters(_json_but_texts),
    offers_first=True,
    gap="\n\n",
)
PRINTED_PARAMETERS = replace(PARAMETERS, call=_by_parameters(_json_of_several))
QWEN3_REASONING = ReasoningForm(always=False, stripped="\n")
QWEN3_5_REASONING = ReasoningForm(always=True, stripped=None)
GLM_REASONING = ReasoningForm(always=True, stripped=None, around=("<think>", "</think>\n"), earlier=True)
"""GLM-4.5V's."""
