"""Ranges of the answers in a conversation's text, for chat templates without `{% generation %}` tags.

The template is run once more with marks, characters of no meaning, around all that is said. An answer reaches from
behind the opening of the assistant's turn, so that tags of reasoning are in it, to the token behind its words or calls:

    <|im_start|>assistant\\n<think>\\n^Well.^\\n</think>\\n\\n^A cat.^<|im_end|>\\n
                           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ trained
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron.vlm.data.turns import ASSISTANT, USER, Call, Message
from omnibal_ext.errors import Rejected
from omnibal_ext.families.markup import KINDS

Range = tuple[int, int]
FIRST, LAST = 0x100000, 0x10FF00
"""Characters used as marks: message number n has FIRST + n."""
MARK = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")


def with_answers(
    run: Callable[..., str], text: str, messages: Sequence[Message], opening: str, ending: str
) -> tuple[str, list[Range]]:
    """Return `text`, a conversation as a chat template writes it, and the character range of each of its answers.

    `run` runs the template on other messages; `opening` and `ending` stand before and behind an answer. If nothing ends
    the last answer, `ending` is appended. The range is empty for an answer without words, calls and reasoning. Raises
    `Rejected` (unsupported_field, reserved_words) if the template changes what is said.
    """
    marked = run([_marked(message, chr(FIRST + number)) for number, message in enumerate(messages)])
    if MARK.search(text):
        raise Rejected("reserved_words", f"the conversation has characters between {chr(FIRST)!r} and {chr(LAST)!r}")
    marks = [(ord(mark[0]) - FIRST, mark.start() - count) for count, mark in enumerate(MARK.finditer(marked))]
    changes = sum(one != other for (one, _), (other, _) in pairwise(marks))
    found = {number for number, _ in marks}
    left_out = [number for number, message in enumerate(messages) if _says(message) and number not in found]
    if left_out or MARK.sub("", marked) != text or changes != len(found) - 1:
        what = f"leaves out turn {left_out[0]}" if left_out else "changes or mixes what is said"
        raise Rejected("unsupported_field", f"{what}, so that answers are not found in it")
    ranges = []
    for number, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        own = [index for index, (other, _) in enumerate(marks) if other == number]
        if not own:
            ranges.append((0, 0))
            continue
        first, last = marks[own[0]][1], marks[own[-1]][1]
        before = text[marks[own[0] - 1][1] if own[0] else 0 : first]
        behind = text[last : marks[own[-1] + 1][1] if own[-1] + 1 < len(marks) else len(text)]
        if opening and opening in before:
            start = first - len(before.rpartition(opening)[2])
        else:
            start = _behind_prompt(run, text, messages[:number], first, opening)
        closing, end, _ = behind.partition(ending) if ending else (behind, "", "")
        if end and (message.calls or not message.words.strip() or not closing.strip()):
            last += len(closing) + len(end)
        elif ending and not end and message is messages[-1]:
            text, last = text + ending, len(text) + len(ending)
        elif message.calls:
            raise Rejected("unsupported_field", "does not end calls as it ends answers")
        ranges.append((start, last))
    return text, ranges


def _says(message: Message) -> bool:
    """Return whether a message has words, other than marks of images, videos and sounds."""
    return any(part.strip() and part not in KINDS for part in message.parts or (message.words,))


def _behind_prompt(run: Callable[..., str], text: str, before: Sequence[Message], first: int, opening: str) -> int:
    """Return the index in `text` at which an answer begins: behind the template's generation prompt; if it has none,
    behind the messages `before` and the part of `opening` that follows; `first`, where its words begin, if neither is
    found."""
    try:
        prompt = run(before, add_generation_prompt=True)
        if not text.startswith(prompt) or len(prompt) > first:
            return first
        has_prompt = prompt != run(before)
    except Rejected:
        return first
    if not has_prompt:
        between = text[len(prompt) : first]
        prompt += next((between[:end] for end in range(len(between), 0, -1) if opening.endswith(between[:end])), "")
    return len(prompt)


def _marked(message: Message, mark: str) -> Message:
    """Put `mark` before and behind each text of a message that is not empty, within the white space around it."""

    def around(words: str) -> str:
        core = words.strip()
        return words.replace(core, mark + core + mark, 1) if core and core not in KINDS else words

    calls = tuple(Call(around(call.name), call.arguments) for call in message.calls)
    reasoning = message.reasoning and around(message.reasoning)
    parts = tuple(map(around, message.parts))
    return replace(message, words=around(message.words), calls=calls, reasoning=reasoning, parts=parts)


def opening_of(run: Callable[..., str], chat: Sequence[Message], text: str) -> str:
    """Return what a template writes before an answer: its generation prompt, as far as all answers of `chat` have it.

    `run` runs the template on messages; `text` is `chat` (without reasoning) as it writes it. If there is no such
    prompt, return all that stands between the first question and its answer.
    """
    gaps = [
        text.partition(question.words)[2].partition(answer.words)[0]
        for question, answer in pairwise(chat)
        if (question.role, answer.role) == (USER, ASSISTANT)
    ]
    asked = chat[: 1 + [message.role for message in chat].index(USER)]
    try:
        prompt = given = run(asked, add_generation_prompt=True).removeprefix(run(asked))
    except Rejected:  # it writes nothing without an answer
        return gaps[0]
    while not all(given in gap for gap in gaps):
        given = given[:-1]
    is_known = given and (given == prompt or not gaps[0].rpartition(given)[2].strip())
    return given if is_known else gaps[0]
