"""Messages of a conversation: text and, for models that support them, tools, tool calls, results and reasoning.

How they become one text is a chat template's own matter (`templates.py`). Templates of reasoning models write reasoning
after the user's last question only. A model never sees its reasoning about earlier questions again, so it is not
trained on it either.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


as_json: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False).encode
"""JSON as transformers' chat templates write it: not escaped, keys in order."""


class Call(NamedTuple):
    """One tool call of the assistant."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def texts(self) -> tuple[str, str]:
        """Name, and arguments as JSON."""
        return self.name, as_json(self.arguments)


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
    """A system message or a question as a list of texts and marks of media: some templates write a list differently."""

    @property
    def teaches(self) -> bool:
        """Whether it has anything for the model to learn."""
        said = self.words.strip() or self.calls or (self.reasoning or "").strip()
        return self.role == ASSISTANT and self.trained and bool(said)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the message that will be written: words, reasoning, names and arguments of calls."""
        return (self.words, self.reasoning or "", *(text for call in self.calls for text in call.texts))
