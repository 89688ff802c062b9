"""What a part of a message, or an object in place of a path, says of an image, video or sound is obeyed or refused."""

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron.vlm.data.formats.kinds import IMAGES, SOUNDS, VIDEOS
from megatron.vlm.data.templates import chat_template, render_chat
from megatron.vlm.preprocessing.chat import Conversation, parse_conversation
from megatron.vlm.preprocessing.line_fields import quoted
from megatron.vlm.preprocessing.line_media import written_as
from megatron.vlm.preprocessing.record_media import Senses
from omnibal_ext.errors import Rejected
from omnibal_ext.families.markup import QUOTED
from omnibal_ext.families.registry import MARKUPS

ALL = Senses((IMAGES, VIDEOS, SOUNDS))
PIXEL = base64.b64encode(b"GIF89a").decode()


def asked(*parts: dict[str, Any], **fields: Any) -> Conversation:
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    return parse_conversation({"messages": [*turns, {"role": "assistant", "content": "It."}], **fields}, (), "", ALL)


def image(**said: Any) -> dict[str, Any]:
    return {"type": "image", **said}


OBEYED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen_vl_utils", image(image="a.png"), "a.png"),
    ("qwen_vl_utils", {"type": "image_url", "image_url": "a.png"}, "a.png"),
    ("transformers", image(url="a.png"), "a.png"),
    ("transformers", image(path="a.png"), "a.png"),
    ("transformers", image(base64=PIXEL), f"data:;base64,{PIXEL}"),
    ("OpenAI", {"type": "image_url", "image_url": {"url": "a.png"}}, "a.png"),
    ("OpenAI", {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}}, "a.png"),
    ("OpenAI", {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}}, "a.png"),
    ("Anthropic", image(source={"type": "base64", "media_type": "image/gif", "data": PIXEL}), f"data:;base64,{PIXEL}"),
    ("Anthropic", image(source={"type": "url", "url": "a.png"}, cache_control={"type": "ephemeral"}), "a.png"),
    ("datasets", image(image={"path": "a.png", "bytes": None}), "a.png"),
    ("datasets", image(image="a.png", text=None, video=None, min_pixels=None), "a.png"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("qwen_vl_utils", image(image="a.png", **{name: 280}), name)
      for name in ("resized_height", "resized_width", "min_pixels", "max_pixels")),
    ("OpenAI", {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "detail"),
    ("datasets", image(image={"path": None, "bytes": "R0lG"}), "bytes"),
    ("two names", image(image="a.png", url="b.png"), "both 'image' and 'url'"),
    ("Anthropic", image(source={"type": "file", "file_id": "f_1"}), "file_id"),
    ("qwen_omni_utils", {"type": "audio", "audio": "a.wav", "audio_start": 1.0}, "audio_start"),
    *(("qwen_vl_utils", {"type": "video", "video": "a.mp4", **{name: 8}}, name)
      for name in ("nframes", "min_frames", "max_frames", "video_start", "video_end", "total_pixels", "fps")),
    ("OpenAI", {"type": "video_url", "video_url": {"url": "a.mp4", "fps": 2}}, "fps"),
    ("nobody", image(image=json.loads('{"image": ' * 300 + "7" + "}" * 300)), "neither a path nor a list"),
    ("text", {"type": "text", "text": "a", "weight": 0.5}, "weight"),
    ("OpenAI's responses", {"type": "input_image", "image_url": "a.png"}, "input_image"),
]  # fmt: skip


@pytest.mark.parametrize(("whose", "part", "found"), OBEYED)
def test_an_image_that_is_named_in_anyones_way_is_found(whose: str, part: dict[str, Any], found: str) -> None:
    assert asked(part).media[IMAGES] == (found,), whose


@pytest.mark.parametrize(("whose", "part", "named"), REFUSED)
def test_what_is_not_obeyed_is_refused_by_its_name(whose: str, part: dict[str, Any], named: str) -> None:
    with pytest.raises(Rejected, match=named):
        asked(part)


@pytest.mark.parametrize("field", ["image", "images", "audio", "audios", "video", "videos"])
@pytest.mark.parametrize("said", ["a", {"path": "a"}, {"path": "a", "bytes": None}, {"url": "a"}])
def test_an_object_may_stand_where_a_path_may(field: str, said: Any) -> None:
    given = [said] if field.endswith("s") else said
    found = asked(**{field: given})
    assert [
        *found.media[IMAGES],
        *found.media[SOUNDS],
        *(file for video in found.media[VIDEOS] for file in video.files),
    ] == ["a"]


@pytest.mark.parametrize(("field", "mark"), [("images", "<image>"), ("videos", "<video>"), ("audios", "<audio>")])
@pytest.mark.parametrize("count", [1, 3])
def test_media_without_marks_stand_before_the_first_question(field: str, mark: str, count: int) -> None:
    """As TRL and ms-swift put them, and InternVL's own loader an image."""
    turns = [("system", "Be kind."), ("human", "Which?"), ("gpt", "This."), ("human", "And?"), ("gpt", "That.")]
    record = {"conversations": [{"from": name, "value": text} for name, text in turns], field: ["a"] * count}
    found = [message.words for message in parse_conversation(record, (), "\n", ALL).messages]
    assert found == ["Be kind.", f"{mark}\n" * count + "Which?", "This.", "And?", "That."]
    with pytest.raises(Rejected, match="mark_mismatch"):  # of two kinds nobody knows the order
        parse_conversation({**record, "images": ["a"], "audios": ["b"]}, (), "\n", ALL)


def test_marks_typed_in_a_part_are_words() -> None:
    """As transformers tokenizes them; only a model whose token they are reads them as more."""
    typed = {"type": "text", "text": "Write <image>, <video> and <|image_1|>. "}
    read = asked(image(image="a.png"), typed)
    text = render_chat(read.messages, chat_template("qwen-vl"), MARKUPS["qwen-vl"]).text
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\n{shown}Write <image>, <video> and <|image_1|>. What?<|im_end|>" in text
    assert not asked(typed).media[IMAGES]
    record = {"messages": [{"role": "user", "content": [typed]}, {"role": "assistant", "content": "It."}]}
    for reserved in (quoted("<image>"), "<video>"):
        with pytest.raises(Rejected, match=r"reserved_words: turn 0 contains '<(image|video)>'"):
            parse_conversation(record, (reserved,), "", ALL)
    with pytest.raises(Rejected, match="image_mark_mismatch: a part of turn 0"):
        asked(typed, images=["a.png"])  # meant as a mark, perhaps
    for field in ({"type": "text", "text": QUOTED}, {"type": "text", "text": f"{QUOTED}img>"}):
        with pytest.raises(Rejected, match="reserved_words"):
            asked(field)


def test_parts_make_no_structure_together() -> None:
    """Programs strip each, as Gemma's does."""
    for texts in (("a<end_of_", " turn>b"), ("a<end_of_", "turn>b")):
        with pytest.raises(Rejected, match="reserved_words"):
            parse_conversation(
                {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]},
                              {"role": "assistant", "content": "It."}]},
                ("<end_of_turn>",),
            )  # fmt: skip


@pytest.mark.parametrize("text", [QUOTED, f"{QUOTED}image> hi"])
def test_the_character_that_tells_marks_from_words_is_nobody_s(text: str) -> None:
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]
    records: list[dict[str, Any]] = [
        {"messages": [{**said[0], "content": text}, said[1]]},
        {"messages": [said[0], {**said[1], "content": text}]},
        {"messages": [said[0], {**said[1], "reasoning_content": text}]},
        {"messages": said, "system": text},
        {"messages": said, "tools": [{"name": text}]},
    ]
    for record in records:
        with pytest.raises(Rejected, match="reserved_words"):
            parse_conversation(record, ())


@pytest.mark.parametrize(("written", "there"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_is_found_composed_or_not(tmp_path: Path, written: str, there: str) -> None:
    names = {form: unicodedata.normalize(form, "Zürich/é 1.png") for form in ("NFC", "NFD")}  # type: ignore[arg-type]
    (tmp_path / names[there]).parent.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / names[there])
    assert written_as(tmp_path, names[written], "image", is_url=False) == names[there]


@pytest.mark.parametrize("name", ["é" * 300, "%C3%A9" * 300, "é\x01" * 40])
def test_a_name_that_no_file_can_have_is_missing(tmp_path: Path, name: str) -> None:
    assert written_as(tmp_path, name, "image", is_url=False) == name


def test_a_url_is_decoded_and_a_path_is_told_what_is_there(tmp_path: Path) -> None:
    for name in ("a b.png", "a%20c.png"):
        (tmp_path / name).touch()
    assert written_as(tmp_path, "a%20b.png", "image", is_url=True) == "a b.png"
    assert written_as(tmp_path, "a%20c.png", "image", is_url=True) == "a%20c.png"
    assert written_as(tmp_path, "a%20c.png", "image", is_url=False) == "a%20c.png"
    assert written_as(tmp_path, "a%20d.png", "image", is_url=False) == "a%20d.png"  # which is missing
    with pytest.raises(Rejected, match=r"missing_image: a%20b.png: no such file; 'a b.png' is there"):
        written_as(tmp_path, "a%20b.png", "image", is_url=False)
    with pytest.raises(Rejected, match="path_outside_root"):
        written_as(tmp_path, "%2e%2e/a.png", "image", is_url=True)
