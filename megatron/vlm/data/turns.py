"""What is said in a conversation: words, and where the model knows them, tools, calls, results and reasoning.

A message keeps these apart. `plain` writes them into words by the forms of the model's own chat template, so that what
is left are turns of system, user and assistant: tools stand with the system's words, calls behind the assistant's,
results in a row in one user's turn, reasoning before the assistant's words.

Reasoning is written behind the user's last question only: what a model thought about earlier questions it is never
shown again, so that it is not trained either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.vlm.data.tool_forms import Call, ThoughtForm, ToolForm

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


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
    parts: tuple[str, ...] = ()
    """Of the system's words, where they were given in parts: some templates write these otherwise than a text."""

    @property
    def teaches(self) -> bool:
        """Whether there is something in it that the model is to say."""
        said = self.words.strip() or self.calls or (self.reasoning or "").strip()
        return self.role == ASSISTANT and self.trained and bool(said)

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that will be written."""
        return (self.words, self.reasoning or "", *(text for call in self.calls for text in call.texts))


def plain(
    messages: Sequence[Message],
    tools: Sequence[str] = (),
    form: ToolForm | None = None,
    thoughts: ThoughtForm | None = None,
) -> list[Message]:
    """The same conversation in words alone, as turns of `SYSTEM`, `USER` and `ASSISTANT`.

    `tools` are JSON texts. Where there are tools, calls or results there must be a `form`, where there is reasoning a
    form for `thoughts`.
    """
    written: list[Message] = []
    question = _last_question(messages, form)
    for number, message in enumerate(messages):
        if message.role == ASSISTANT:
            answers, ends = number > question, number == len(messages) - 1
            written.append(_said(message, form, thoughts, answers, ends))
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
    """The number of the message; of the last one where nobody asks."""
    asks = (
        number
        for number, message in enumerate(messages)
        if message.role == USER and not (form and form.is_result(message.words))
    )
    return max(asks, default=len(messages) - 1)


def _said(message: Message, form: ToolForm | None, thoughts: ThoughtForm | None, answers: bool, ends: bool) -> Message:
    """The assistant's turn; `answers`: nobody asks any more, `ends`: the conversation ends with it."""
    words, reasoning = _apart(message) if thoughts else (message.words, "")
    calls = form.called(words, message.calls) if form else ""
    if thoughts and answers and (ends or reasoning or thoughts.always):
        words = thoughts.written(reasoning, words)
    elif thoughts and thoughts.earlier:
        words = thoughts.written("", words)
    return Message(ASSISTANT, words + calls, message.trained)


def _apart(message: Message) -> tuple[str, str]:
    """Words and reasoning; what stands before `</think>` in the words is reasoning too."""
    words = message.words
    if message.reasoning is not None or "</think>" not in words:
        return words, message.reasoning or ""
    reasoning = words.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return words.split("</think>")[-1].lstrip("\n"), reasoning
