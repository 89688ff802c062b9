"""Checking one line of chat JSONL: a verdict for every fault, and nothing faulty passes."""

import json
from typing import Any

import pytest

from megatron.vlm.data.formats.kinds import IMAGES, VIDEOS
from megatron.vlm.data.templates import chat_template
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, USER
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.record_media import SIGHT, Senses
from omnibal_ext.errors import Rejected
from omnibal_ext.families.registry import MARKUPS
from tests.demo import turns

RESERVED = (*chat_template("internlm2-chat").tokens, *MARKUPS["internvl"].reserved)


def parse(record: Any, sees_videos: bool = False) -> Any:
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_conversation(line, RESERVED, senses=Senses((IMAGES, VIDEOS)) if sees_videos else SIGHT)


def test_a_good_conversation_is_read_in_order() -> None:
    talk = [{"from": "system", "value": "Be kind."}, *turns("<image>\n<image>\nHi", "Hello", "More?", "No")]
    chat = parse({"image": ["a.png", "b.png"], "conversations": talk})
    assert [message.role for message in chat.messages] == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    assert chat.media[IMAGES] == ("a.png", "b.png")


@pytest.mark.parametrize("image", [{}, {"image": None}, {"image": ""}, {"image": []}])
def test_a_text_only_conversation_has_no_images(image: dict[str, Any]) -> None:
    assert parse({**image, "conversations": turns("Hi", "Hello")}).media[IMAGES] == ()


IMAGE, TWO = {"image": "a.png"}, {"image": ["a.png", "b.png"]}
FAULTS: dict[str, list[Any]] = {
    "not_utf8": ['{"conversations": "é"}'.encode("latin-1"), {"conversations": turns("Hi \ud83d", "Hello")}],
    "malformed_line": [
        b'{"conversations": [', b"[" * 100_000, [1, 2], {"id": 1}, {"conversations": "Hi"},
        {"conversations": [{"from": "human"}]}, {"conversations": [7]},
        {"image": 7, "conversations": turns("Hi", "Hello")},
        {"image": ["a.png", None], "conversations": turns("<image>", "Hello")},
        {"image": "\ud83d.png", "conversations": turns("<image>", "Hello")},
    ],
    "empty_conversation": [{"conversations": words} for words in ([], turns("Hi"), turns("Hi", " \n"))],
    "bad_roles": [
        {"conversations": [{"from": "critic", "value": "Hi"}]}, {"conversations": [{"from": ["human"], "value": "Hi"}]},
        {"conversations": turns("Hi", "Hello", "More?")},
        {"conversations": [*turns("Hi", "Hello"), *turns("Hi", "Hello")][1:]},
        {"conversations": [*turns("Hi", "Hello"), {"from": "system", "value": "Be kind."}]},
    ],
    "reserved_words": [
        {"conversations": turns("Hi <|im_end|>", "Hello")}, {"conversations": turns("Hi", "<IMG_CONTEXT>")},
    ],
    "too_many_characters": [{"conversations": turns("Hi", "a" * 10_000_000)}],
    "image_mark_mismatch": [
        {**images, "conversations": turns(*words)} for images, words in (
            (IMAGE, ("<image>" * 140_000, "Hello")), (IMAGE, ("<image>", "an <image>")),
            (TWO, ("<image>", "an <image>")), ({}, ("Hi", "<image>")), (IMAGE, ("Hi", "<image>")),
            ({}, ("<image>", "Hello")), (TWO, ("<image>", "Hello")),
            (IMAGE, ("<image><image>", "Hello")),
        )
    ],
}  # fmt: skip


GOOD, SHOWN = turns("Hi", "Hello"), turns("<image>", "Hello")


MEANT: dict[str, dict[str, Any]] = {
    "unsupported_media": {
        "video": "a.mp4", "videos": ["a.mp4"], "audioPath": "a.wav", "frames": ["1.png", "2.png"],
    },
    "unsupported_field": {
        "image_path": "a.png", "img": "a.png", "imageFile": "a.png", "image2": "b.png", "pictures": ["a.png"],
        "rejected": {"from": "gpt", "value": "Go"}, "objects": {"bbox": [[1, 2, 3, 4]]}, "weight": 0.5,
    },
    "malformed_line": {"tools": "[{}]", "system": 3},
}  # fmt: skip
"""By reason, fields beside a good conversation."""


def test_what_says_nothing_to_the_model_passes() -> None:
    about = {
        "id": 7, "source": "coco", "width_list": [448], "height_list": [448], "image_id": "000123", "img_width": 640,
        "video_id": 3, "image_source": "coco", "video": None, "videos": [], "audio": "", "tools": "", "weight": 1,
        "length": 12, "score": 0.7, "imagery": "rich", "frames_count": 3,
    }  # fmt: skip
    chat = parse(
        {**about, "image": "a.png", "conversations": [{**GOOD[0], "value": "<image>", "markdown": None}, GOOD[1]]}
    )
    assert chat.media[IMAGES] == ("a.png",)


def test_images_is_another_name_of_image() -> None:
    for paths in ("a.png", ["a.png"], ["a.png", "b.png"]):
        said = turns("<image>" * (len(paths) if isinstance(paths, list) else 1), "Hello")
        assert parse({"images": paths, "conversations": said}) == parse({"image": paths, "conversations": said})


def test_a_system_field_is_a_system_turn() -> None:
    as_turn = parse({"conversations": [{"from": "system", "value": "Be kind."}, *GOOD]})
    assert parse({"system": "Be kind.", "conversations": GOOD}) == as_turn


@pytest.mark.parametrize("field", ["weight", "loss", "train"])
def test_a_turn_can_be_left_out_of_the_loss(field: str) -> None:
    said = [{**turn, field: int(number == 3)} for number, turn in enumerate([*GOOD, *turns("More?", "No")])]
    assert [message.trained for message in parse({"conversations": said}).messages] == [False, False, False, True]


FILM = turns("<video>\nWhat happens?", "A cat jumps.")
FRAMES = ["1.png", "2.png", "3.png"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"video": "a.mp4"}, [("a.mp4",)]),
        ({"video": "a.mp4", "fps": 30}, [("a.mp4",)]),  # a number about the file
        ({"video": {"video": "a.mp4"}}, [("a.mp4",)]),
        ({"videos": ["a.mp4"]}, [("a.mp4",)]),
        ({"video": FRAMES, "fps": 2}, [tuple(FRAMES), (0.0, 0.5, 1.0), 2.0]),
        ({"videos": [{"frames": FRAMES, "fps": 2}]}, [tuple(FRAMES), (0.0, 0.5, 1.0), 2.0]),
        ({"video": {"video": FRAMES, "times": [1, 2, 5]}}, [tuple(FRAMES), (1.0, 2.0, 5.0), 0.5]),
    ],
)
def test_a_video_is_a_file_or_its_frames(record: dict[str, Any], expected: list[Any]) -> None:
    (video,) = parse({**record, "conversations": FILM}, sees_videos=True).media[VIDEOS]
    assert [video.files, video.times, video.rate][: len(expected)] == expected


def test_marks_of_images_and_videos_are_apart_and_llava_has_one_for_both() -> None:
    both = {"image": "a.png", "video": "a.mp4", "conversations": turns("<video> and <image>", "Yes")}
    chat = parse(both, sees_videos=True)
    assert (chat.media[IMAGES], [video.files for video in chat.media[VIDEOS]]) == (("a.png",), [("a.mp4",)])
    llava = {"video": "a.mp4", "conversations": turns("<image>\nWhat?", "Yes")}
    for record in (llava, {**asked(), "videos": ["a.mp4"]}):
        assert parse(record, sees_videos=True).messages[0].words == "<video>\nWhat?"


def asked(**part: Any) -> dict[str, Any]:
    content = [{"type": "video", **part}, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]}


BY_NAME: list[tuple[str, str, Any]] = [
    *((reason, "", record) for reason, many in FAULTS.items() for record in many),
    *((reason, field, {field: value, "conversations": GOOD})
      for reason, fields in MEANT.items() for field, value in fields.items()),
    *(("unsupported_media", mark, {"conversations": turns(f"{mark} What happens?", "Hello")})
      for mark in ("<video>", "<audio>", "<image_1>", "<|video_pad|>")),
    ("unsupported_field", "weight", {"conversations": [GOOD[0], {**GOOD[1], "weight": 0.5}]}),
    ("unsupported_field", "train", {"conversations": [{**GOOD[0], "train": True}, GOOD[1]]}),
    ("malformed_line", "tool_calls", {"conversations": [GOOD[0], {**GOOD[1], "tool_calls": [{}]}]}),
    ("unsupported_media", "video", {"conversations": [{**GOOD[0], "video": "a.mp4"}, GOOD[1]]}),
    ("bad_roles", "tool's", {"conversations": [*GOOD, {"from": "observation", "value": "4"}, GOOD[1]]}),
    ("unsupported_field", "bytes", {"images": [{"bytes": "..."}], "conversations": SHOWN}),
    ("malformed_line", "images", {"image": "a.png", "images": ["a.png"], "conversations": SHOWN}),
    ("bad_roles", "system", {"system": "Be", "conversations": [{"from": "system", "value": "Go"}, *GOOD]}),
    ("empty_conversation", "no words", {"conversations": [GOOD[0], {**GOOD[1], "weight": 0}]}),
]  # fmt: skip
OF_VIDEOS: list[tuple[str, str, Any]] = [
    ("video_mark_mismatch", "1 <video>", {"conversations": FILM}),
    ("video_mark_mismatch", "1 elsewhere", {"video": "a.mp4", "conversations": turns("Hi", "<video>")}),
    ("image_mark_mismatch", "0 images", {"video": "a.mp4", "conversations": turns("<video><image>", "Yes")}),
    *(("malformed_line", word, {**fields, "conversations": FILM}) for word, fields in (
        ("'fps' or 'times'", {"video": FRAMES}), ("'fps' or 'times'", {"video": FRAMES, "fps": 2, "times": [1, 2, 3]}),
        ("above 0", {"video": FRAMES, "fps": 0}), ("above 0", {"video": FRAMES, "fps": "2"}),
        ("as many", {"video": {"video": FRAMES, "times": [1, 2]}}),
        ("grow", {"video": {"video": FRAMES, "times": [1, 3, 2]}}), ("neither a path", {"video": 7}),
        ("neither a path", {"video": [], "videos": [[]]}), ("leave one", {"video": "a.mp4", "videos": ["a.mp4"]}),
        ("no list of videos", {"videos": "a.mp4"}),
    )),
    ("malformed_line", "elsewhere", {**asked(video="a.mp4"), "video": "a.mp4"}),
    ("unsupported_field", "'nframes'", asked(video="a.mp4", nframes=8)),
    ("unsupported_field", "'fps'", asked(video="a.mp4", fps=1)),
    ("unsupported_media", "<|video_pad|>", {"conversations": turns("<|video_pad|>", "Yes")}),
    ("unsupported_media", "frames", {"frames": FRAMES, "conversations": FILM}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sees_videos", "reason", "word", "record"),
    [*((False, *case) for case in BY_NAME), *((True, *case) for case in OF_VIDEOS)],
)
def test_every_fault_has_its_reason(sees_videos: bool, reason: str, word: str, record: Any) -> None:
    """And so has what would change the meaning."""
    with pytest.raises(Rejected) as verdict:
        parse(record, sees_videos)
    assert verdict.value.reason == reason
    assert word in verdict.value.detail
    assert len(verdict.value.detail) < 300
