"""One record becomes a checked conversation, or is rejected with a reason: InternVL's, LLaVA's, ShareGPT's, OpenAI's.

    {"id": 7, "image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                                  {"from": "gpt", "value": "A cat."}]}

`image` (or `images`) may be a list, null or absent; a `system` turn may come first, or `system` beside the conversation
be its words. `messages` of `role` and `content` say the same; a content may be a list of parts, an image among them
where it is seen (`{"type": "image_url", "image_url": {"url": ...}}`, or "image" with a path, or one of `images`):

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]},
                  {"role": "assistant", "content": "A cat."}]}

Videos are named in the same ways (`record_media.py`), for models that see them. Of LLaVA's files, where `<image>` is
the mark of a video, it is taken for one.

A turn of the assistant with `weight` 0 (or `loss` or `train` false) is read, not trained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.vlm.data.markup import IMAGE_MARK, VIDEO_MARK
from megatron.vlm.data.rejects import Rejected
from megatron.vlm.data.templates import ASSISTANT, SYSTEM, USER, Message
from megatron.vlm.preprocessing.fields import LINE_FIELDS, MEDIA_MARKS, TURN_FIELDS, unsupported
from megatron.vlm.preprocessing.record_media import (
    VIDEO_FIELDS,
    VideoReference,
    images_of,
    is_unicode,
    videos_of,
    words_of,
)

TURN_NAMES = {"role": "from", "content": "value"}
TRAINED_FIELDS = ("weight", "loss", "train")
ROLES = {"human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "system": SYSTEM}
MAX_CHARACTERS = 2**20
"""Of a conversation: tokenizers take half a kilobyte of memory for each."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order (an optional system turn, then user and assistant in turns), images and videos, one a mark."""

    messages: tuple[Message, ...]
    images: tuple[str, ...]
    videos: tuple[VideoReference, ...] = ()


def parse_conversation(
    record: bytes | Mapping[str, Any], reserved: Sequence[str], gap: str = "\n", sees_videos: bool = False
) -> Conversation:
    """Read and check one record; `reserved` are the texts that nobody's words may contain.

    An image or video that is a part of a message becomes a mark and `gap` in its words.

    Raises `Rejected` with the reasons not_utf8, malformed_line, unsupported_media, unsupported_field,
    empty_conversation, bad_roles, reserved_words, image_mark_mismatch and video_mark_mismatch.
    """
    fields = _decode(record) if isinstance(record, bytes) else record
    _check_fields("", fields, LINE_FIELDS | VIDEO_FIELDS if sees_videos else LINE_FIELDS)
    turns = _turns(fields)
    messages = (*_system(fields), *_messages(turns, gap, sees_videos))
    images = images_of(fields, turns)
    videos = videos_of(fields, turns) if sees_videos else ()
    if videos and not images:
        messages = _with_video_marks(messages)
    _check_roles(messages)
    _check_words(messages, reserved, sees_videos)
    _check_marks(messages, IMAGE_MARK, len(images))
    _check_marks(messages, VIDEO_MARK, len(videos))
    return Conversation(messages, images, videos)


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", f"byte {error.start} of the line is no UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Rejected("malformed_line", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Rejected("malformed_line", f"a JSON {type(record).__name__} where an object is due")
    return record


def _check_fields(where: str, fields: Mapping[str, Any], honoured: frozenset[str]) -> None:
    if verdict := unsupported(fields, honoured):
        reason, detail = verdict
        raise Rejected(reason, where + detail[:250])


def _system(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """`system` beside the conversation, as ShareGPT's files have it."""
    words = record.get("system") or ""
    if not isinstance(words, str):
        raise Rejected("malformed_line", "'system' is no text")
    return (Message(SYSTEM, words),) if words else ()


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns as `from`, `value` and what else they say, whichever words the record has for them."""
    given = [name for name in ("conversations", "messages") if record.get(name) is not None]
    if len(given) == 2:
        raise Rejected("malformed_line", "both 'conversations' and 'messages' are given; leave one")
    turns = record[given[0]] if given else None
    if not isinstance(turns, list):
        raise Rejected("malformed_line", "neither 'conversations' nor 'messages' is a list")
    found = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise Rejected("malformed_line", f"turn {number} is no object")
        renamed = {str(TURN_NAMES.get(name, name)): value for name, value in turn.items() if value is not None}
        if not isinstance(renamed.get("value"), str | list):
            raise Rejected("malformed_line", f"turn {number} has no text 'value' or 'content'")
        _check_fields(f"turn {number}: ", renamed, TURN_FIELDS)
        found.append(renamed)
    return found


def _messages(turns: Sequence[dict[str, Any]], gap: str, videos: bool) -> tuple[Message, ...]:
    messages = []
    for number, turn in enumerate(turns):
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise Rejected("bad_roles", f"turn {number} is from {str(speaker)[:40]!r}, not one of {', '.join(ROLES)}")
        value = turn["value"]
        words = value if isinstance(value, str) else "".join(words_of(part, number, gap, videos) for part in value)
        messages.append(Message(ROLES[speaker], words, _is_trained(turn, number)))
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


def _with_video_marks(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """LLaVA's files of videos have the mark of an image where the video is."""
    if any(VIDEO_MARK in message.words for message in messages):
        return messages
    return tuple(replace(message, words=message.words.replace(IMAGE_MARK, VIDEO_MARK)) for message in messages)


def _check_words(messages: Sequence[Message], reserved: Sequence[str], videos: bool) -> None:
    if (length := sum(len(message.words) for message in messages)) > MAX_CHARACTERS:
        raise Rejected("too_many_characters", f"{length} characters, limit {MAX_CHARACTERS}; cut it into conversations")
    for number, message in enumerate(messages):
        if not is_unicode(message.words):
            raise Rejected("not_utf8", f"turn {number} has half of a surrogate pair")
        if mark := MEDIA_MARKS.search(message.words.replace(VIDEO_MARK, "") if videos else message.words):
            known = f"{IMAGE_MARK!r} and {VIDEO_MARK!r} are the marks" if videos else f"{IMAGE_MARK!r} is the only mark"
            raise Rejected("unsupported_media", f"turn {number} contains {mark[0][:40]!r}; {known}")
        found = next((text for text in reserved if text in message.words), None)
        if found is not None:
            raise Rejected("reserved_words", f"turn {number} contains {found!r}, which the model reads as structure")


def _check_marks(messages: Sequence[Message], mark: str, given: int) -> None:
    marks = {message.role: 0 for message in messages}
    for message in messages:
        marks[message.role] += message.words.count(mark)
    if marks[USER] != given or sum(marks.values()) != given:
        elsewhere, what = sum(marks.values()) - marks[USER], mark.strip("<>")
        detail = f"{marks[USER]} {mark} marks in the user's turns, {elsewhere} elsewhere, for {given} {what}s"
        raise Rejected(f"{what}_mark_mismatch", detail)
