"""Chat templates: from a conversation to one text, and the character ranges of it that are trained.

A template is a Jinja program: one of ours, by its name (`omnibal_ext/families/*/NAME.jinja`), or that of a model's
folder (`preprocessing/folder_template.py`). Of the assistant's turns the words and the end are trained, of other turns
nothing:

    <s><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                              ^^^^^^^^^^^^^^^ trained

The trained ranges stand between a program's `{% generation %}` tags, which all of ours have, or are found by marks
(`answers.py`). What a program has a form for (a system message, tools, reasoning) is seen from what it writes.
"""

import hashlib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import Any

from megatron.vlm.data.answers import Range, opening_of, with_answers
from megatron.vlm.data.chat_program import REMEDY, TAG, ChatProgram
from megatron.vlm.data.sandbox import DATE
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, TOOL, USER, Call, Message
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.markup import IMAGE_MARK, KINDS, QUOTED, HeardTurns, ImageMarkup
from omnibal_ext.families.registry import TEMPLATES
from omnibal_ext.modalities.vision.runs import TokenRuns
from omnibal_ext.reading.costs import CostError, bounded

TOKENS = re.compile(r"\{#- tokens: (.*) -#\}")
"""Pattern of the comment that lists a template's special tokens, in the order in which missing ones get ids."""
FORMS: tuple[tuple[str, ...], ...] = ((), (USER, ASSISTANT, TOOL), (SYSTEM, USER, ASSISTANT, TOOL))
"""Roles whose contents are lists: tokenizers' templates take texts, processors' lists."""

LISTED = re.compile(r"""(["'])type\1: *(["'])text\2""")
"""Pattern of the text that a program writes if it prints a list of parts as it is."""

TOLD = Message(SYSTEM, "Be brief.And kind.", parts=("Be brief.", "And kind."))
QUESTION = (Message(USER, "What is it?"), Message(ASSISTANT, "A cat."))
SEVERAL = (*QUESTION, Message(USER, "One\ntwo: 3"), Message(ASSISTANT, "So.\n\nYes"))
CHATS = (SEVERAL, (TOLD, *SEVERAL), QUESTION, (TOLD, *QUESTION))
CALL = Call("look", {"at": "Zürich <b>", "days": [2, 1], "wet": True})
CALLING = (
    Message(USER, "Rain?"),
    Message(ASSISTANT, "", calls=(CALL,)),
    Message(TOOL, "wet"),
    Message(ASSISTANT, "Yes."),
)
LOOK = (
    '{"type": "function", "function": {"name": "look", "description": "Sees <all>", "parameters": {"z": 1, "a": "é"}}}'
)
"""Conversations, and a tool, by which is seen what a program writes."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Text of a conversation and its trained half-open character ranges, in order.

    The text is tokenised separately before and after each of `cuts`.
    """

    text: str
    trained: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...] = ()


class ChatTemplate:
    """A chat template: a program, and the special tokens of which it may write some.

    `digest` is the program's, however its file is called. Further arguments are `ChatProgram`'s.
    """

    def __init__(self, name: str, source: str, special: Sequence[str], **known: Any) -> None:
        self.name, self._special, self._program = name, special, ChatProgram(source, name, **known)
        self.digest = hashlib.sha256(repr((source, sorted(known.items()))).encode()).hexdigest()

    def text(
        self, messages: Sequence[Message], tools: Sequence[str] = (), parts: Collection[str] | None = None
    ) -> str | None:
        """Write a conversation; None if the template refuses it or leaves out what somebody says. `parts`: roles whose
        contents are lists; None: as the template takes them. Raises UserError if it takes more time or memory than
        `bounded` allows."""
        try:
            run = partial(self._program.run, messages, tools, self._parts if parts is None else parts)
            text = bounded(run).replace(TAG, "")
        except CostError as error:
            raise UserError(f"chat template {self.name!r} {error} for a few short words; {REMEDY}") from error
        except Rejected:
            return None
        said = [words for one in messages for words in (set(one.parts).difference(KINDS) or (one.words,))]
        said += [call.name for message in messages for call in message.calls]
        return text if not LISTED.search(text) and all(words.strip() in text for words in said) else None

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        for chat in ((TOLD, *QUESTION), QUESTION):
            for parts in FORMS:
                if self.text(chat, parts=parts) is not None:
                    return parts
        return ()

    @cached_property
    def _lists_system(self) -> bool:
        return self.text((TOLD, *QUESTION), parts={*self._parts, SYSTEM}) is not None

    @cached_property
    def has_system(self) -> bool:
        """Whether it writes a system message."""
        return self.text((TOLD, *QUESTION)) is not None

    @cached_property
    def pair(self) -> bool:
        """Whether it writes a single question with its answer only, and no longer conversation."""
        return self.text(SEVERAL) is None and self.text((TOLD, *SEVERAL)) is None

    @cached_property
    def has_tools(self) -> bool:
        """Whether it has a form for tools, tool calls and their results."""
        text = self.text(CALLING, (LOOK,)) or ""
        return "Sees" in text and "Zürich" in text

    @cached_property
    def shows_results(self) -> bool:
        """Whether results of tools may be images."""
        return self.text((*CALLING[:2], Message(TOOL, IMAGE_MARK), CALLING[3]), (LOOK,)) is not None

    @cached_property
    def has_reasoning(self) -> bool:
        """Whether it has a form for the reasoning before an answer."""
        thought = (QUESTION[0], Message(ASSISTANT, "A cat.", reasoning="It purrs."))
        return "It purrs." in (self.text(thought) or "")

    @cached_property
    def images_first(self) -> bool | None:
        """Whether images are written before all words of their message; None: it takes no images as parts."""
        text = self._shown("One", IMAGE_MARK, "Two") if IMAGE_MARK in self._media else None
        if text is None:
            return None
        is_moved = text == self._shown(IMAGE_MARK, "One", "Two")
        return is_moved and text.index(self._media[IMAGE_MARK]) < text.index("One")

    @cached_property
    def _media(self) -> Mapping[str, str]:
        """Mark -> text that the template writes for such a part of a message (image, video, sound), if it takes it."""
        without = self._shown("One")
        found = dict[str, str]()
        for mark in KINDS:
            text = inserted(without, self._shown("One", mark))
            if text and text not in found.values():  # a program may write an image for whatever it does not know
                found[mark] = text
        return found

    @cached_property
    def _takes_parts(self) -> bool:
        return self._shown("One", "Two") is not None

    def _takes(self, message: Message) -> bool:
        """Return whether the parts of a message, if it has some, may be given to the template as a list."""
        if message.role != USER or not message.parts:
            return True
        return self._takes_parts and self._media.keys() >= {part for part in message.parts if part in KINDS}

    def _shown(self, *parts: str) -> str | None:
        asked = Message(USER, "".join(parts), parts=parts)
        return self.text((asked, QUESTION[1]), parts={USER, *self._parts})

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Special tokens that it writes or that end an answer."""
        texts = "".join(self.text(chat) or "" for chat in CHATS)
        return tuple(token for token in self._special if token in texts or token == self._eos)

    @cached_property
    def ending(self) -> str:
        """Special token that it writes behind an answer; "" if there is none."""
        text = next(filter(None, map(self.text, CHATS)), "")
        behind = text.partition(QUESTION[1].words)[2].lstrip()
        return max((token for token in self.tokens if behind.startswith(token)), key=len, default="")

    @property
    def end_of_turn(self) -> str:
        """Token at which a reply stops: `ending`, or else the tokenizer's end of sequence."""
        return self.ending or self._eos

    @property
    def _eos(self) -> str:
        return self._program.variables.get("eos_token", "")

    def check(self) -> None:
        """Raise UserError if it writes no conversations, or none in which answers are found and end."""
        name = f"chat template {self.name!r}"
        fault = f"{name} does not write a question and its answer as they are"
        for chat in filter(self.text, CHATS):
            try:
                self.written(chat)
                fault = "" if self.end_of_turn else f"{name} writes no special token of the tokenizer behind an answer"
                break
            except Rejected as error:
                fault = error.detail
        if fault:
            raise UserError(f"{fault}; {REMEDY}")

    def written(
        self, messages: Sequence[Message], tools: Sequence[str] = (), default_system: bool = True
    ) -> tuple[str, list[Range]]:
        """Return the text of a conversation, and for each of the assistant's messages the range that may be trained.
        Raises `Rejected` (unsupported_field, reserved_words, costly_template)."""
        try:
            return bounded(partial(self._written, messages, tools, default_system))
        except CostError as error:
            raise Rejected("costly_template", f"chat template {self.name!r} {error} for it") from error
        except Rejected as error:
            raise Rejected(error.reason, f"chat template {self.name!r} {error.detail}") from error

    def _written(
        self, messages: Sequence[Message], tools: Sequence[str], default_system: bool
    ) -> tuple[str, list[Range]]:
        parts = {*self._parts, SYSTEM} if messages[0].parts and self._lists_system else self._parts
        messages = [one if self._takes(one) else replace(one, parts=()) for one in messages]
        media = self._media if any(message.parts for message in messages if message.role == USER) else {}

        def run(chat: Sequence[Message], **variables: Any) -> str:
            text = self._program.run(chat, tools, parts, no_default_system=not default_system, **variables)
            for mark, written in media.items():
                text = text.replace(written, mark)
            if media and LISTED.search(text):
                raise Rejected("unsupported_field", "writes a list where it is given one")
            return text

        text = run(messages)
        if DATE in text:
            raise Rejected("unsupported_field", "writes the day's date where there is no system message, or always")
        if not self._program.has_tags:
            return with_answers(run, text, messages, self._opening, self.ending)
        pieces, ranges = text.split(TAG), []
        if len(pieces) != 1 + 2 * sum(message.role == ASSISTANT for message in messages):
            raise Rejected("unsupported_field", "marks other answers than those of the conversation")
        at = len(pieces[0])
        for answer, behind in zip(pieces[1::2], pieces[2::2], strict=True):
            end = at + len(answer)
            if not answer.endswith(self.ending) and behind.lstrip().startswith(self.ending):
                end += behind.index(self.ending) + len(self.ending)
            ranges.append((at, end))
            at += len(answer) + len(behind)
        return "".join(pieces), ranges

    @cached_property
    def _opening(self) -> str:
        chat, text = next((chat, text) for chat in CHATS if (text := self.text(chat)) is not None)
        return opening_of(partial(self._program.run, tools=(), parts=self._parts), chat, text)


def inserted(without: str | None, text: str | None) -> str:
    """Return what is in `text` and not in `without`, without white space around it and words before ("Picture 1: "); ""
    if they differ otherwise."""
    size = len(text or "") - len(without or "")
    if size <= 0 or text is None or without is None:
        return ""
    cuts = [text[at : at + size] for at in range(len(without) + 1) if text[:at] + text[at + size :] == without]
    cut = min(map(str.strip, cuts), key=lambda one: one[:1] not in "<[", default="")
    return re.sub(r"^[^<\[]*\s(?=[^<\[]*[<\[])", "", cut)


@cache
def chat_template(name: str) -> ChatTemplate:
    """Return the built-in template of that name. Raises `UserError` naming the known ones."""
    if name not in TEMPLATES:
        raise UserError(f"unknown chat template {name!r}; known: {', '.join(TEMPLATES)}")
    source = TEMPLATES[name].read_text(encoding="utf-8")
    tokens = TOKENS.search(source)
    assert tokens
    return ChatTemplate(name, source, tokens[1].split())


def render_chat(
    messages: Sequence[Message],
    template: ChatTemplate,
    markup: ImageMarkup,
    shown: Iterable[TokenRuns | HeardTurns | Sequence[float]] = (),
    tools: Sequence[str] = (),
    default_system: bool = True,
) -> RenderedChat:
    """Render a conversation by `template`, with marks of images, videos and sounds replaced by `markup`.

    `shown`: for images and videos in order, an image's `TokenRuns`, the seconds of a video's steps, or the `HeardTurns`
    of one that is heard too; default: one run.
    `tools`: JSON texts. `default_system`: a template's own system message is written where there is none. Raises
    `Rejected` if the template has no form for something.
    """
    text, ranges = template.written(messages, tools, default_system)
    further = {one.modality.mark: one.text for one in markup.further}
    left, moves, found = iter(shown), [(0, 0)], Counter[str]()

    def text_of(mark: str) -> str:
        if mark in further:
            return further[mark]
        runs = next(left, TokenRuns())
        if isinstance(runs, HeardTurns):
            return markup.heard_video_text(runs)
        return markup.image_text(runs) if isinstance(runs, TokenRuns) else markup.video_text(runs)

    def as_words(mark: re.Match[str]) -> str:
        words = text_of(mark[0])
        found[mark[0]] += 1
        moves.append((mark.end(), moves[-1][1] + len(words) - len(mark[0])))
        return words

    marks = markup.any_mark
    text = marks.sub(as_words, text)
    if found != Counter(mark for message in messages for mark in marks.findall(message.words)):
        raise Rejected("unsupported_media", f"chat template {template.name}: writes other images than it is given")

    def moved(at: int) -> int:
        return at + moves[bisect_right(moves, at, key=itemgetter(0)) - 1][1]

    spoken = [message for message in messages if message.role == ASSISTANT]
    trained = tuple(
        (moved(start), moved(end))
        for message, (start, end) in zip(spoken, ranges, strict=True)
        if message.trained and end > start
    )
    cuts = tuple(start for start, _ in trained) if template.pair else ()
    return RenderedChat(text.replace(QUOTED, "<"), trained, cuts)
