"""Checking one line of chat JSONL: a verdict for every fault, and nothing faulty passes."""

import json
from typing import Any

import pytest

from megatron.vlm.data.chat import Rejected, parse_conversation
from megatron.vlm.data.markup import MARKUPS
from megatron.vlm.data.templates import ASSISTANT, SYSTEM, USER, chat_template

RESERVED = (*chat_template("internlm2-chat").tokens, *MARKUPS["internvl"].reserved)


def turns(*words: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(words)]


def parse(record: Any) -> Any:
    return parse_conversation(json.dumps(record).encode(), RESERVED)


def test_a_good_conversation_is_read_in_order() -> None:
    chat = parse(
        {
            "image": ["a.png", "b.png"],
            "conversations": [
                {"from": "system", "value": "Be kind."},
                *turns("<image>\n<image>\nHi", "Hello", "More?", "No"),
            ],
        }
    )
    assert [message.role for message in chat.messages] == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    assert chat.images == ("a.png", "b.png")


@pytest.mark.parametrize("image", [{}, {"image": None}, {"image": ""}, {"image": []}])
def test_a_text_only_conversation_has_no_images(image: dict[str, Any]) -> None:
    assert parse({**image, "conversations": turns("Hi", "Hello")}).images == ()


@pytest.mark.parametrize(
    ("reason", "record"),
    [
        ("malformed_line", [1, 2]),
        ("malformed_line", {"id": 1}),
        ("malformed_line", {"conversations": "Hi"}),
        ("malformed_line", {"conversations": [{"from": "human"}]}),
        ("malformed_line", {"conversations": [7]}),
        ("malformed_line", {"image": 7, "conversations": turns("Hi", "Hello")}),
        ("malformed_line", {"image": ["a.png", None], "conversations": turns("<image>", "Hello")}),
        ("empty_conversation", {"conversations": []}),
        ("empty_conversation", {"conversations": turns("Hi")}),
        ("empty_conversation", {"conversations": turns("Hi", " \n")}),
        ("bad_roles", {"conversations": [{"from": "tool", "value": "Hi"}]}),
        ("bad_roles", {"conversations": [{"from": ["human"], "value": "Hi"}]}),
        ("bad_roles", {"conversations": turns("Hi", "Hello", "More?")}),
        ("bad_roles", {"conversations": [*turns("Hi", "Hello"), *turns("Hi", "Hello")][1:]}),
        ("bad_roles", {"conversations": [*turns("Hi", "Hello"), {"from": "system", "value": "Be kind."}]}),
        ("reserved_words", {"conversations": turns("Hi <|im_end|>", "Hello")}),
        ("not_utf8", {"conversations": turns("Hi \ud83d", "Hello")}),
        ("malformed_line", {"image": "\ud83d.png", "conversations": turns("<image>", "Hello")}),
        ("reserved_words", {"conversations": turns("Hi", "<IMG_CONTEXT>")}),
        ("image_mark_mismatch", {"conversations": turns("<image>Hi", "Hello")}),
        ("image_mark_mismatch", {"image": "a.png", "conversations": turns("Hi", "Hello")}),
        ("image_mark_mismatch", {"image": "a.png", "conversations": turns("<image><image>", "Hello")}),
        ("image_mark_mismatch", {"image": "a.png", "conversations": turns("Hi", "<image>")}),
        ("image_mark_mismatch", {"image": ["a.png", "b.png"], "conversations": turns("<image>", "<image>")}),
        ("image_mark_mismatch", {"image": "a.png", "conversations": turns("<image>" * 150_000, "Hello")}),
    ],
)
def test_every_fault_has_its_reason(reason: str, record: Any) -> None:
    with pytest.raises(Rejected) as verdict:
        parse(record)
    assert verdict.value.reason == reason
    assert len(verdict.value.detail) < 300


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("not_utf8", '{"conversations": "é"}'.encode("latin-1")),
        ("malformed_line", b'{"conversations": ['),
        ("malformed_line", b"[" * 100_000),
    ],
)
def test_lines_that_are_no_json_are_rejected(reason: str, line: bytes) -> None:
    with pytest.raises(Rejected) as verdict:
        parse_conversation(line, RESERVED)
    assert verdict.value.reason == reason
