"""What is said in a conversation: words, and where the model knows them, tools, calls, results and reasoning.

A message keeps these apart. `plain` writes them into words, as the model's own Hugging Face chat template does, so that
what is left are turns of system, user and assistant:

    tools      at the end of the system's words
    calls      behind the assistant's words:   <tool_call>\\n{"name": "look", "arguments": {"at": 3}}\\n</tool_call>
    results    in a user's turn, those in a row in one:   <tool_response>\\n...\\n</tool_response>
    reasoning  before the assistant's words:   <think>\\n...\\n</think>\\n\\n

Reasoning is written behind the user's last question only: what a model thought about earlier questions it is never
shown again, so that it is not trained either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


class Call(NamedTuple):
    """A tool that the assistant calls: its name, and its arguments as the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: who speaks (`SYSTEM`, `USER`, `ASSISTANT`, `TOOL`) and the words, with `<image>` marks still in them.

    Of the assistant's turns those count that are `trained`; they alone have calls and reasoning (None: not said).
    """

    role: str
    words: str
    trained: bool = True
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None

    @property
    def teaches(self) -> bool:
        """Whether there is something in it that the model is to say."""
        said = self.words.strip() or self.calls or (self.reasoning or "").strip()
        return self.role == ASSISTANT and self.trained and bool(said)

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that will be written."""
        return (self.words, self.reasoning or "", *(text for call in self.calls for text in call))


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model's text shows tools, calls and results: what stands around them; several stand `gap` apart."""

    offer: tuple[str, str]
    """Around the tools; each stands on a line of its own, as JSON."""
    call: tuple[str, str, str]
    """Before the name, between name and arguments, behind them."""
    result: tuple[str, str]
    gap: str = "\n"
    pictures: bool = False
    """A result may hold images and videos."""

    def offered(self, tools: Sequence[str]) -> str:
        """Tools, each the JSON text of one, as the system's words tell them."""
        before, after = self.offer
        return before + "".join(f"\n{tool}" for tool in tools) + after

    def called(self, words: str, calls: Sequence[Call]) -> str:
        """What stands behind the assistant's words where it calls tools."""
        before, between, after = self.call
        written = [before + call.name + between + call.arguments + after for call in calls]
        return (self.gap if words and calls else "") + self.gap.join(written)

    def returned(self, words: str) -> str:
        """A tool's result as a user's turn says it."""
        return self.result[0] + words + self.result[1]

    def is_result(self, words: str) -> bool:
        """Whether a user's words are a result, written out: they are no question then."""
        return words.startswith(self.result[0].rstrip()) and words.endswith(self.result[1].lstrip())


HERMES = ToolForm(
    offer=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>",
    ),
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    result=("<tool_response>\n", "\n</tool_response>"),
)
"""That of Qwen2.5 and Qwen3."""


def plain(
    messages: Sequence[Message], tools: Sequence[str] = (), form: ToolForm | None = None, thinks: bool = False
) -> list[Message]:
    """The same conversation in words alone, as turns of `SYSTEM`, `USER` and `ASSISTANT`.

    `tools` are JSON texts. Where there are tools, calls or results there must be a `form`, where there is reasoning the
    model must be one that `thinks`.
    """
    written: list[Message] = []
    question = _last_question(messages, form)
    for number, message in enumerate(messages):
        if message.role == ASSISTANT:
            written.append(_said(message, form, thinks, number > question, number == len(messages) - 1))
        elif message.role == TOOL:
            assert form
            before = written.pop().words + form.gap if messages[number - 1].role == TOOL else ""
            written.append(Message(USER, before + form.returned(message.words)))
        else:
            written.append(message)
    if not tools:
        return written
    assert form
    if written[0].role != SYSTEM:
        return [Message(SYSTEM, form.offered(tools)), *written]
    return [replace(written[0], words=f"{written[0].words}\n\n{form.offered(tools)}"), *written[1:]]


def _last_question(messages: Sequence[Message], form: ToolForm | None) -> int:
    """The number of the message; of the last one where nobody asks."""
    asks = (
        number
        for number, message in enumerate(messages)
        if message.role == USER and not (form and form.is_result(message.words))
    )
    return max(asks, default=len(messages) - 1)


def _said(message: Message, form: ToolForm | None, thinks: bool, answers: bool, ends: bool) -> Message:
    """The assistant's turn as Qwen3 writes it: its last answer has a place for thoughts, others where it thought.

    `answers` is that nobody asks any more, `ends` that the conversation ends with it.
    """
    words, reasoning = _apart(message) if thinks else (message.words, "")
    calls = form.called(words, message.calls) if form else ""
    if thinks and answers and (ends or reasoning):
        words = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + words.lstrip("\n")
    return Message(ASSISTANT, words + calls, message.trained)


def _apart(message: Message) -> tuple[str, str]:
    """Words and reasoning; what stands before `</think>` in the words is reasoning too."""
    words = message.words
    if message.reasoning is not None or "</think>" not in words:
        return words, message.reasoning or ""
    reasoning = words.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return words.split("</think>")[-1].lstrip("\n"), reasoning
