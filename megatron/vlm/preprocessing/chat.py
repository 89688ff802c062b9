"""Parse and check one record of InternVL's, LLaVA's, ShareGPT's or OpenAI's format.

    {"id": 7, "image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                                  {"from": "gpt", "value": "A cat."}]}

`image` (or `images`) may be a list, null or absent. A system message is the first turn, or the record's field `system`.
Alternatively `messages` of `role` and `content`; a content may be a list of parts, with an image where it belongs
(`{"type": "image_url", "image_url": {"url": ...}}`, or "image" with a path, or one of `images`):

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]},
                  {"role": "assistant", "content": "A cat."}]}

Videos and sounds are given in the same ways (`record_media.py`), for models that take them; LLaVA's `<image>` may mark
a video, `<sound>` a sound. For tools, calls and results see `tool_turns.py`; an assistant turn may have
`reasoning_content` (or `reasoning`). An assistant turn with `weight` 0 (or `loss` or `train` false) is not trained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from megatron.vlm.data.formats.kinds import IMAGES, Kind
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, TOOL, USER, Call, Message
from megatron.vlm.preprocessing.line_fields import LINE_FIELDS, MEDIA_MARKS, TURN_FIELDS, plain, quoted, unsupported
from megatron.vlm.preprocessing.record_media import SIGHT, Senses, hears_videos, media_of, words_of
from megatron.vlm.preprocessing.tool_turns import calls_of, tools_of
from omnibal_ext.errors import Rejected
from omnibal_ext.families.markup import IMAGE_MARK, QUOTED, joined, media_first
from omnibal_ext.reading.checks import is_unicode, shown
from omnibal_ext.reading.document import described

TURN_NAMES = {"role": "from", "content": "value", "reasoning": "reasoning_content"}
TRAINED_FIELDS = ("weight", "loss", "train")
CALLS = ("function_call", "tool_call")
"""ShareGPT's roles of turns that are tool calls: they are joined to the assistant turn before."""
ROLES = {
    **{"human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "system": SYSTEM},
    **dict.fromkeys(("tool", "observation", "tool_response"), TOOL),
    **dict.fromkeys(CALLS, ASSISTANT),
}
MAX_CHARACTERS = 2**20
"""Most characters of a conversation: tokenizers need half a kilobyte of memory per character."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages (optional system, then user and assistant alternating), and an image, video or sound for each mark.

    Tool results follow the assistant turn that calls. `tools` are JSON texts.
    """

    messages: tuple[Message, ...]
    media: Mapping[Kind, tuple[Any, ...]]
    """Media of each kind that the model takes, in the order of the marks: paths, or `VideoReference`."""
    tools: tuple[str, ...] = ()
    hears_videos: bool | None = None
    """Whether the sound of its videos is heard; None: it does not say."""


def parse_conversation(
    record: bytes | Mapping[str, Any],
    reserved: Sequence[str],
    gap: str = "\n",
    senses: Senses = SIGHT,
    first: bool = False,
) -> Conversation:
    """Parse and check one record. `reserved`: texts that no message may contain; `senses`: what the model takes.

    An image, video or sound part of a message becomes a mark followed by `gap`. `first`: such marks, and the only image
    mark of a text, are put before the words of their question, as LLaVA's own programs do.

    Raises `Rejected` with the reasons not_utf8, malformed_line, unsupported_media, unsupported_field,
    empty_conversation, bad_roles, reserved_words, image_mark_mismatch, video_mark_mismatch and audio_mark_mismatch.
    """
    fields = _decode(record) if isinstance(record, bytes) else _without_nulls(record)
    _check_fields("", fields, LINE_FIELDS | senses.fields)
    turns = _turns(fields)
    tools = tools_of(fields)
    messages = (*_system(fields), *_messages(turns, gap, senses, first))
    media = {kind: media_of(kind, fields, turns) for kind in senses.kinds}
    named = {kind.mark for kind, given in media.items() if given}
    for mark, other in ((kind.mark, other) for kind in media if kind.mark in named for other in kind.others):
        if other not in named:  # LLaVA's marks of images may mark videos
            messages = _marked(messages, other, mark)
    messages = _marked_in_front(messages, {kind: len(given) for kind, given in media.items() if given}, gap, senses)
    _check_roles(messages)
    _check_words(messages, tools, reserved, senses)
    for kind, given in media.items():
        _check_marks(messages, kind.mark, len(given))
    return Conversation(messages, media, tools, hears_videos(fields) if senses.hears_videos else None)


def _marked(messages: tuple[Message, ...], other: str, mark: str) -> tuple[Message, ...]:
    """Replace another program's mark, `other`, by `mark` in all messages, unless one of them has `mark`."""
    if any(mark in one.words for one in messages):
        return messages
    return tuple(
        replace(
            one,
            words=one.words.replace(other, mark),
            parts=tuple(mark if part == other else part for part in one.parts),
        )
        for one in messages
    )


def _marked_in_front(
    messages: tuple[Message, ...], given: Mapping[Kind, int], gap: str, senses: Senses
) -> tuple[Message, ...]:
    """Put marks before the first question's words, as TRL, ms-swift and InternVL do, if media of one kind only are
    given and no message has a mark. `given`: how many, by kind."""
    if len(given) != 1 or any(senses.kinds_in(one.words) or MEDIA_MARKS.search(one.words) for one in messages):
        return messages
    meant = [quoted(mark) for kind in (*given, IMAGES) for mark in (kind.mark, *kind.others)]
    for number, one in enumerate(messages):
        if any(mark in one.words for mark in meant):
            detail = f"a part of turn {number} has a mark in its text and none is an image: in parts, marks are words"
            raise Rejected("image_mark_mismatch", detail)
    marks = [kind.mark for kind, count in given.items() for _ in range(count)]
    first = next((number for number, one in enumerate(messages) if one.role == USER), len(messages))
    asked = (
        replace(one, words="".join(mark + gap for mark in marks) + one.words, parts=one.parts and (*marks, *one.parts))
        for one in messages[first : first + 1]
    )
    return (*messages[:first], *asked, *messages[first + 1 :])


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", f"byte {error.start} of the line is no UTF-8") from error
    except json.JSONDecodeError as error:
        before = shown(error.doc[max(error.pos - 40, 0) : error.pos])
        fault = f"not JSON: {described(error)} at character {error.pos + 1}, behind {before}"
        raise Rejected("malformed_line", fault) from error
    except (ValueError, RecursionError) as error:
        raise Rejected("malformed_line", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Rejected("malformed_line", f"a JSON {type(record).__name__} where an object is due")
    return record


def _without_nulls(value: Any) -> Any:
    """Drop null fields: a table's cells have every field that one of them has."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _check_fields(where: str, fields: Mapping[str, Any], honoured: frozenset[str]) -> None:
    if verdict := unsupported(fields, honoured):
        reason, detail = verdict
        raise Rejected(reason, where + detail[:250])


def _system(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return a system message from the record's field `system`, as in ShareGPT's files; () if it has none."""
    words = record.get("system") or ""
    if not isinstance(words, str):
        raise Rejected("malformed_line", "'system' is no text")
    return (Message(SYSTEM, plain(words, "'system'")),) if words else ()


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns with ShareGPT's field names (`from`, `value`, ...), whichever names the record has."""
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
        if renamed.get("tool_calls"):
            renamed.setdefault("value", "")
        if not isinstance(renamed.get("value"), str | list):
            raise Rejected("malformed_line", f"turn {number} has no text 'value' or 'content'")
        _check_fields(f"turn {number}: ", renamed, TURN_FIELDS)
        found.append(renamed)
    return found


def _messages(turns: Sequence[dict[str, Any]], gap: str, senses: Senses, first: bool) -> tuple[Message, ...]:
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise Rejected("bad_roles", f"turn {number} is from {str(speaker)[:40]!r}, not one of {', '.join(ROLES)}")
        trained, value = _is_trained(turn, number), turn["value"]
        if speaker in CALLS:
            said = Message(ASSISTANT, "", trained, calls_of(value, f"turn {number}"))
            if messages and (messages[-1].role, messages[-1].trained) == (ASSISTANT, trained):
                before = messages.pop()
                said = replace(before, calls=before.calls + said.calls)
        else:
            role, calls, reasoning = ROLES[speaker], *_calls_and_reasoning(turn, number)
            leads = first and role == USER
            if isinstance(value, str):
                words = plain(value, f"turn {number}")
                said = Message(role, _led(words, gap, senses) if leads else words, trained, calls, reasoning)
            else:
                parts = tuple(words_of(part, number, senses) for part in value)
                parts = media_first(parts) if leads else parts
                said = Message(
                    role, joined(parts, gap), trained, calls, reasoning, parts if role in (SYSTEM, USER) else ()
                )
        messages.append(said)
    return tuple(messages)


def _led(words: str, gap: str, senses: Senses) -> str:
    """Return a question's text with the mark of an image moved in front of its words, if it is the only mark."""
    before, mark, behind = words.partition(IMAGE_MARK)
    if not before.strip() or not mark or senses.kinds_in(before + behind):
        return words
    return mark + gap + f"{before}{behind}".strip()


def _calls_and_reasoning(turn: dict[str, Any], number: int) -> tuple[tuple[Call, ...], str | None]:
    """Return the tool calls and the reasoning of a turn."""
    reasoning, calls = turn.get("reasoning_content"), turn.get("tool_calls")
    if (reasoning or calls) and ROLES[turn["from"]] != ASSISTANT:
        field = "tool_calls" if calls else "reasoning_content"
        raise Rejected("unsupported_field", f"turn {number} is not the assistant's and has {field!r}")
    if not isinstance(reasoning, str | None):
        raise Rejected("malformed_line", f"turn {number}: 'reasoning_content' is no text")
    return calls_of(calls, f"turn {number}: 'tool_calls'") if calls else (), reasoning


def _is_trained(turn: dict[str, Any], number: int) -> bool:
    """Say whether an assistant turn is trained (the result is ignored for other roles)."""
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
    if not any(message.teaches for message in spoken):
        raise Rejected("empty_conversation", "no words of the assistant to learn from")
    if any(message.role == SYSTEM for message in messages[1:]):
        raise Rejected("bad_roles", "a system turn that is not the first turn")
    due: tuple[str, ...] = (USER,)
    for number, message in enumerate(spoken):
        if message.role not in due:
            raise Rejected("bad_roles", f"turn {number} is the {message.role}'s where the {due[0]}'s is due")
        due = _roles_after(message)
    if spoken[-1].role != ASSISTANT:
        raise Rejected("bad_roles", "the last turn is not the assistant's")


def _roles_after(message: Message) -> tuple[str, ...]:
    if message.role == ASSISTANT:
        return (TOOL, USER) if message.calls else (USER,)
    return (ASSISTANT, TOOL) if message.role == TOOL else (ASSISTANT,)


def _check_words(messages: Sequence[Message], tools: Sequence[str], reserved: Sequence[str], senses: Senses) -> None:
    texts = [(f"turn {number}", text) for number, message in enumerate(messages) for text in message.texts]
    texts += [("'tools'", tool) for tool in tools]
    for text in (*tools, *(text for message in messages for text in message.texts[1:])):
        plain(text, "a call, a tool or reasoning")
    if (length := sum(len(text) for _, text in texts)) > MAX_CHARACTERS:
        raise Rejected("too_many_characters", f"{length} characters, limit {MAX_CHARACTERS}; cut it into conversations")
    # As a program may write them that strips each part.
    texts += [
        (f"turn {number}", "".join(map(str.strip, one.parts))) for number, one in enumerate(messages) if one.parts
    ]
    for where, text in texts:
        if not is_unicode(text):
            raise Rejected("not_utf8", f"{where} has half of a surrogate pair")
        # `<image>`, the first, is none of these.
        if mark := MEDIA_MARKS.search(reduce(lambda left, mark: left.replace(mark, ""), senses.marks[1:], text)):
            *some, last = map(repr, senses.marks)
            known = f"{', '.join(some)} and {last} are the marks" if some else f"{last} is the only mark"
            raise Rejected("unsupported_media", f"{where} contains {mark[0][:40]!r}; {known}")
        found = next((word for word in reserved if word in text), None)
        if QUOTED in text:
            found = found or next((word for word in reserved if word in text.replace(QUOTED, "<")), None)
        if found is not None:
            written = found.replace(QUOTED, "<")
            raise Rejected("reserved_words", f"{where} contains {written!r}, which the model reads as structure")


def _check_marks(messages: Sequence[Message], mark: str, given: int) -> None:
    """Raise `Rejected` unless marks are in user and tool messages only, one for each image, video or sound."""
    seen = sum(message.words.count(mark) for message in messages if message.role in (USER, TOOL))
    everywhere = sum(text.count(mark) for message in messages for text in message.texts)
    if not seen == everywhere == given:
        what = mark.strip("<>")
        detail = f"{seen} {mark} marks in the user's turns, {everywhere - seen} elsewhere, for {given} {what}s"
        raise Rejected(f"{what}_mark_mismatch", detail)
