"""The messages of a conversation: text and, for models that support them, tools, tool calls, results and reasoning.

A `Message` has separate fields for these. `flatten_turns` writes them into the text as the model's own chat template
does, which leaves system, user and assistant turns: tool definitions go into the system's turn, calls after the
assistant's words, consecutive results into one user turn, reasoning before the assistant's words.

Reasoning is written only after the user's last question. A model never sees its reasoning about earlier questions
again, so it is not trained on it either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.vlm.data.tool_forms import Call, ReasoningForm, ToolForm

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: its role (`SYSTEM`, `USER`, `ASSISTANT`, `TOOL`) and its text, with `<image>` marks in it.

    Only assistant turns have `calls` and `reasoning` (None: not given); they count in the loss if `trained`.
    """

    role: str
    words: str
    trained: bool = True
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    parts: tuple[str, ...] = ()
    """The system message as a list of texts, if it was given so: some templates write a list differently."""

    @property
    def teaches(self) -> bool:
        """Whether it has anything for the model to learn."""
        said = self.words.strip() or self.calls or (self.reasoning or "").strip()
        return self.role == ASSISTANT and self.trained and bool(said)

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts that will be written."""
        return (self.words, self.reasoning or "", *(text for call in self.calls for text in call.texts))


def flatten_turns(
    messages: Sequence[Message],
    tools: Sequence[str] = (),
    form: ToolForm | None = None,
    reasoning: ReasoningForm | None = None,
) -> list[Message]:
    """The same conversation as plain `SYSTEM`, `USER` and `ASSISTANT` turns.

    `tools` are JSON texts. Tools, calls and results need a `form`; a message's reasoning needs a `reasoning` form.
    """
    written: list[Message] = []
    question = _last_question(messages, form)
    for number, message in enumerate(messages):
        if message.role == ASSISTANT:
            is_after, is_last = number > question, number == len(messages) - 1
            written.append(_assistant_turn(message, form, reasoning, is_after, is_last))
        elif message.role == TOOL:
            assert form
            before = f"{written.pop().words}\n" if messages[number - 1].role == TOOL else ""
            written.append(Message(USER, before + form.returned(message.words)))
        else:
            written.append(message)
    if not tools:
        return written
    assert form
    if written[0].role != SYSTEM:
        return [Message(SYSTEM, form.offered(tools, None)), *written]
    return [replace(written[0], words=form.offered(tools, written[0].words)), *written[1:]]


def _last_question(messages: Sequence[Message], form: ToolForm | None) -> int:
    """The index of the last user message that is not a tool result; of the last message if there is none."""
    asks = (
        number
        for number, message in enumerate(messages)
        if message.role == USER and not (form and form.is_result(message.words))
    )
    return max(asks, default=len(messages) - 1)


def _assistant_turn(
    message: Message, form: ToolForm | None, reasoning: ReasoningForm | None, is_after_question: bool, is_last: bool
) -> Message:
    words, thought = _split_reasoning(message) if reasoning else (message.words, "")
    calls = form.called(words, message.calls) if form else ""
    if reasoning and is_after_question and (is_last or thought or reasoning.always):
        words = reasoning.written(thought, words)
    elif reasoning and reasoning.earlier:
        words = reasoning.written("", words)
    return Message(ASSISTANT, words + calls, message.trained)


def _split_reasoning(message: Message) -> tuple[str, str]:
    """Words and reasoning; text before `</think>` in the words is reasoning too."""
    words = message.words
    if message.reasoning is not None or "</think>" not in words:
        return words, message.reasoning or ""
    reasoning = words.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return words.split("</think>")[-1].lstrip("\n"), reasoning
