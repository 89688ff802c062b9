"""One line of InternVL chat JSONL becomes a checked conversation, or is rejected with a reason.

    {"id": 7, "image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                                  {"from": "gpt", "value": "A cat."}]}

`image` (or `images`) may be a list, null or absent; a `system` turn may come first, or `system` beside the conversation
be its words. A turn of the assistant with `weight` 0 (or `loss` or `train` false) is read, not trained.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.vlm.data.fields import LINE_FIELDS, MEDIA_MARKS, TURN_FIELDS, unsupported
from megatron.vlm.data.markup import IMAGE_MARK
from megatron.vlm.data.templates import ASSISTANT, SYSTEM, USER, Message

TRAINED_FIELDS = ("weight", "loss", "train")
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

    Raises `Rejected` with the reasons not_utf8, malformed_line, unsupported_media, unsupported_field,
    empty_conversation, bad_roles, reserved_words and image_mark_mismatch.
    """
    record = _decode(line)
    _check_fields("", record, LINE_FIELDS)
    messages = (*_system(record), *_messages(record))
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


def _check_fields(where: str, fields: dict[str, Any], honoured: frozenset[str]) -> None:
    if verdict := unsupported(fields, honoured):
        reason, detail = verdict
        raise Rejected(reason, where + detail[:250])


def _system(record: dict[str, Any]) -> tuple[Message, ...]:
    """`system` beside the conversation, as ShareGPT's files have it."""
    words = record.get("system") or ""
    if not isinstance(words, str):
        raise Rejected("malformed_line", "'system' is no text")
    return (Message(SYSTEM, words),) if words else ()


def _messages(record: dict[str, Any]) -> tuple[Message, ...]:
    turns = record.get("conversations")
    if not isinstance(turns, list):
        raise Rejected("malformed_line", "'conversations' is no list")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise Rejected("malformed_line", f"turn {number} is no object with a text 'value'")
        _check_fields(f"turn {number}: ", turn, TURN_FIELDS)
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise Rejected("bad_roles", f"turn {number} is from {str(speaker)[:40]!r}, not one of {', '.join(ROLES)}")
        messages.append(Message(ROLES[speaker], turn["value"], _is_trained(turn, number)))
    return tuple(messages)


def _is_trained(turn: dict[str, Any], number: int) -> bool:
    """What a turn says of its own loss; user's turns have none whatever they say."""
    given = [(name, turn[name]) for name in TRAINED_FIELDS if turn.get(name) is not None]
    for name, value in given:
        if not isinstance(value, int | float) or value not in (0, 1):
            raise Rejected("unsupported_field", f"turn {number} has {name!r} {str(value)[:40]!r}; 0 and 1 are known")
        if value and ROLES[turn["from"]] != ASSISTANT:
            raise Rejected(
                "unsupported_field", f"turn {number} is not the assistant's and has {name!r}, which trains it"
            )
    return all(value for _, value in given)


def _images(record: dict[str, Any]) -> tuple[str, ...]:
    given = {name: record[name] for name in ("image", "images") if record.get(name) not in (None, "", [])}
    if len(given) > 1:
        raise Rejected("malformed_line", "both 'image' and 'images' are given; leave one")
    for name, value in given.items():
        paths = value if isinstance(value, list) else [value]
        if not all(isinstance(path, str) and path and _is_unicode(path) for path in paths):
            raise Rejected("malformed_line", f"{name!r} is neither a path nor a list of paths")
        return tuple(paths)
    return ()


def _is_unicode(text: str) -> bool:
    """JSON can escape half of a surrogate pair, which is no character and which tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_roles(messages: Sequence[Message]) -> None:
    spoken = [message for message in messages if message.role != SYSTEM]
    if not any(message.words.strip() for message in spoken if message.role == ASSISTANT and message.trained):
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
        if mark := MEDIA_MARKS.search(message.words):
            raise Rejected(
                "unsupported_media", f"turn {number} contains {mark[0][:40]!r}; {IMAGE_MARK!r} is the only mark"
            )
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
