"""One line of InternVL chat JSONL becomes a checked conversation, or is rejected with a reason.

    {"id": 7, "image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                                  {"from": "gpt", "value": "A cat."}]}

`image` may be a list, null or absent; a `system` turn may come first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.vlm.data.templates import ASSISTANT, IMAGE_MARK, SYSTEM, USER, Message

ROLES = {"human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "system": SYSTEM}


class Rejected(Exception):  # noqa: N818 - it is a verdict on a sample, not a fault of the program
    """A sample that cannot be used: a reason out of a small vocabulary, to count by, and a detail for the reader."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order (an optional system turn, then user and assistant in turns) and image paths, one a mark."""

    messages: tuple[Message, ...]
    images: tuple[str, ...]


def parse_conversation(line: bytes, reserved: Sequence[str]) -> Conversation:
    """Read and check one line; `reserved` are the texts that nobody's words may contain.

    Raises `Rejected` with the reasons not_utf8, malformed_line, empty_conversation, bad_roles, reserved_words and
    image_mark_mismatch.
    """
    record = _decode(line)
    messages = _messages(record)
    images = _images(record)
    _check_roles(messages)
    _check_words(messages, reserved)
    _check_marks(messages, len(images))
    return Conversation(messages, images)


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", f"byte {error.start} of the line is no UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Rejected("malformed_line", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Rejected("malformed_line", f"a JSON {type(record).__name__} where an object is due")
    return record


def _messages(record: dict[str, Any]) -> tuple[Message, ...]:
    turns = record.get("conversations")
    if not isinstance(turns, list):
        raise Rejected("malformed_line", "'conversations' is no list")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise Rejected("malformed_line", f"turn {number} is no object with a text 'value'")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise Rejected("bad_roles", f"turn {number} is from {str(speaker)[:40]!r}, not one of {', '.join(ROLES)}")
        messages.append(Message(ROLES[speaker], turn["value"]))
    return tuple(messages)


def _images(record: dict[str, Any]) -> tuple[str, ...]:
    value = record.get("image")
    if value is None or value == "":
        return ()
    paths = value if isinstance(value, list) else [value]
    if not all(isinstance(path, str) and path and _is_unicode(path) for path in paths):
        raise Rejected("malformed_line", "'image' is neither a path nor a list of paths")
    return tuple(paths)


def _is_unicode(text: str) -> bool:
    """JSON can escape half of a surrogate pair, which is no character and which tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_roles(messages: Sequence[Message]) -> None:
    spoken = [message for message in messages if message.role != SYSTEM]
    if not spoken or not any(message.words.strip() for message in spoken if message.role == ASSISTANT):
        raise Rejected("empty_conversation", "no words of the assistant to learn from")
    if any(message.role == SYSTEM for message in messages[1:]):
        raise Rejected("bad_roles", "a system turn that is not the first turn")
    for number, message in enumerate(spoken):
        due = (USER, ASSISTANT)[number % 2]
        if message.role != due:
            raise Rejected("bad_roles", f"turn {number} is the {message.role}'s where the {due}'s is due")
    if spoken[-1].role != ASSISTANT:
        raise Rejected("bad_roles", "the last turn is not the assistant's")


def _check_words(messages: Sequence[Message], reserved: Sequence[str]) -> None:
    for number, message in enumerate(messages):
        if not _is_unicode(message.words):
            raise Rejected("not_utf8", f"turn {number} has half of a surrogate pair")
        found = next((text for text in reserved if text in message.words), None)
        if found is not None:
            raise Rejected("reserved_words", f"turn {number} contains {found!r}, which the model reads as structure")


def _check_marks(messages: Sequence[Message], images: int) -> None:
    marks = {message.role: 0 for message in messages}
    for message in messages:
        marks[message.role] += message.words.count(IMAGE_MARK)
    if marks[USER] != images or sum(marks.values()) != images:
        elsewhere = sum(marks.values()) - marks[USER]
        detail = f"{marks[USER]} {IMAGE_MARK} marks in the user's turns, {elsewhere} elsewhere, for {images} images"
        raise Rejected("image_mark_mismatch", detail)
