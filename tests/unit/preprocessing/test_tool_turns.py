"""Tools, calls, results and reasoning are written and trained as Qwen's programs have them."""

import json
import random
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from megatron.vlm.data.chat_program import GENERATION
from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.templates import chat_template
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.folder_template import folder_template
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import SampleMaker
from omnibal_ext.errors import Rejected
from omnibal_ext.families.registry import TEMPLATES
from omnibal_ext.modalities.modality import VISION
from tests.demo import byte_level

tokenizers = pytest.importorskip("tokenizers")

FAMILIES = {
    "qwen2.5-vl": 1878636762, "qwen3-vl": 1329305604, "qwen3-vl-thinking": 2176588702, "qwen3.5": 385155749,
    "qwen3.6": 1234321630,
}  # fmt: skip
"""CRC-32 of 60 conversations and of what is trained of each, as transformers' `apply_chat_template` wrote and masked
them with programs like those that are published."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS_OF_FORMS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LOOK = {"type": "function", "function": {"name": "look", "description": "Sieht <alles> & mehr", "parameters": {"z": 1}}}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"b": None, "a": ["é", 0.5, True]}}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = byte_level([json.dumps([LOOK, WAIT]), "What is it? A cat."] * 3, 400)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in WORDS_OF_FORMS])  # as Qwen's: plain
    tokenizer.save(str(folder / "tokenizer.json"))
    Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save(folder / "a.png")
    return folder


def maker(root: Path, name: str, **changed: Any) -> SampleMaker:
    tiling = Tiling(14, 4, 64, False, "native")
    return SampleMaker(Recipe(root, root / "tokenizer.json", name, tiling, 0.25, markup="qwen-vl", **changed))


def made(opened: SampleMaker, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    sample = opened.make(Row(1, json.dumps(record).encode()))
    return sample.tokens.tolist(), sample.loss_mask.tolist()


def trained(opened: SampleMaker, ids: list[int], mask: list[int]) -> tuple[str, str]:
    """All words, and those that are trained."""
    kept = [one for one, counts in zip(ids, mask, strict=True) if counts]
    decode = opened.tokenizer._model.decode  # type: ignore[attr-defined]
    return decode(ids, skip_special_tokens=False), decode(kept, skip_special_tokens=False)


def call(draw: random.Random) -> dict[str, Any]:
    arguments = draw.choice(
        [{}, {"at": 3}, {"of": 'Zürich <b>\n"x"', "and": {"z": [1, None], "a": 1.5}, "wet": True, "n": None}]
    )
    return {"type": "function", "function": {"name": draw.choice(["look", "wait"]), "arguments": arguments}}


def drawn(seed: int, thinks: bool, pictures: bool) -> dict[str, Any]:
    """A conversation of one to three questions; each is answered behind none to three rounds of calls."""
    draw = random.Random(seed)
    words = ["Yes.", "A cat,\nasleep.", "\n\nHm \n", "Zürich 🐈", "<tool_response>\nold\n</tool_response>"]
    inline = ["<think>\nWell.\n</think>\n\nYes.", "Hm.</think>No.", "a<think>b</think>c</think>\n\nd"] if thinks else []

    def picture(role: str, text: str) -> dict[str, Any]:
        parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": text}]
        return {"role": role, "content": parts if pictures and draw.random() < 0.3 else text}

    def said(content: str | None, **more: Any) -> dict[str, Any]:
        thought = draw.choice([None, None, "", "Let me see.", "\n\nOne\n\ntwo\n"]) if thinks else None
        more |= {} if thought is None else {"reasoning_content": thought}
        return {"role": "assistant", "content": content, **more}

    messages = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 3)):
        messages.append(picture("user", draw.choice(words)))
        for _ in range(draw.randint(0, 3)):
            calls = [call(draw) for _ in range(draw.randint(1, 3))]
            messages.append(said(draw.choice([None, "", *words[:3], *inline]), tool_calls=calls))
            messages += [picture("tool", draw.choice(words[:4])) for _ in calls]
        messages.append(said(draw.choice(words + inline)))
    tools = draw.choice([[], [LOOK], [LOOK, WAIT]])
    return {"messages": messages} | ({"tools": tools} if tools else {})


@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokens_and_masks_are_those_of_the_family_s_own_template(root: Path, name: str) -> None:
    template = chat_template(name)
    assert template.has_tools
    opened, calls, thoughts, crc = maker(root, name), 0, 0, 0
    for seed in range(60):
        text, said = trained(opened, *made(opened, drawn(seed, template.has_reasoning, template.shows_results)))
        crc = crc32(f"{text}\0{said}".encode(), crc)
        calls, thoughts = calls + text.count("</tool_call>"), thoughts + text.count("</think>")
    assert crc == FAMILIES[name]
    assert calls > 100
    assert (thoughts > 60) == template.has_reasoning


OPENAI = [
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "I look.",
     "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 3, "of": "é"}}},
                    {"id": "2", "type": "function", "function": {"name": "wait", "arguments": {}}}]},
    {"role": "tool", "tool_call_id": "1", "name": "look", "content": "A cat."},
    {"role": "tool", "tool_call_id": "2", "content": "Done."},
    {"role": "assistant", "content": "A cat."},
]  # fmt: skip
SHAREGPT = [{"from": role, "value": words} for role, words in (
    ("human", "What?"), ("gpt", "I look."),
    ("function_call", '{"name": "look", "arguments": {"at":3, "of": "\\u00e9"}}'),
    ("function_call", '[{"name": "wait", "arguments": "{}"}]'), ("observation", "A cat."), ("observation", "Done."),
    ("gpt", "A cat."),
)]  # fmt: skip


def test_a_call_of_no_weight_is_not_trained(root: Path) -> None:
    opened = maker(root, "qwen3-vl-thinking")
    untrained = [*OPENAI[:1], {**OPENAI[1], "weight": 0}, *OPENAI[2:]]
    ids, mask = made(opened, {"tools": [LOOK], "messages": untrained})
    assert ids == made(opened, {"tools": [LOOK], "messages": OPENAI})[0]
    assert trained(opened, ids, mask)[1] == "<think>\n\n</think>\n\nA cat.<|im_end|>"


def test_every_way_of_saying_it_is_one(root: Path) -> None:
    opened = maker(root, "qwen3-vl")
    expected = made(opened, {"tools": [LOOK], "messages": OPENAI})
    as_text = json.loads(json.dumps(OPENAI))
    for one in as_text[1]["tool_calls"]:
        one["function"]["arguments"] = json.dumps(one["function"]["arguments"], separators=(",", ":"))
    of_swift = {"human": "user", "gpt": "assistant", "function_call": "tool_call", "observation": "tool_response"}
    swift = [{"role": of_swift[turn["from"]], "content": turn["value"]} for turn in SHAREGPT]
    padded = {  # as a table's cells have it: every field of the column
        "tools": [{**LOOK, "strict": None}],
        "messages": [{"tool_calls": None, "reasoning_content": None, "name": None, **turn} for turn in OPENAI],
    }
    sample = opened.make(Row(1, padded))
    assert (sample.tokens.tolist(), sample.loss_mask.tolist()) == expected
    for record in (
        {"tools": json.dumps([LOOK]), "messages": as_text},
        {"tools": [LOOK["function"]], "messages": OPENAI},
        {"tools": json.dumps([LOOK["function"]]), "conversations": SHAREGPT},
        {"tools": [LOOK], "messages": swift},
    ):
        assert made(opened, record) == expected


def test_a_shorter_conversation_is_written_as_if_the_rest_had_never_been_said(root: Path) -> None:
    """Also where the model is shown its thoughts for the last question alone."""
    turns = [
        {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two.", "reasoning_content": "1 + 1"},
        {"role": "user", "content": "More?" * 50}, {"role": "assistant", "content": "No."},
    ]  # fmt: skip
    record = {"tools": [LOOK], "messages": turns}
    whole = maker(root, "qwen3-vl-thinking")
    shorter = maker(root, "qwen3-vl-thinking", max_tokens=len(made(whole, record)[0]) - 1, shorten=("truncate",))
    assert made(shorter, record) == made(whole, {**record, "messages": turns[:2]})


def parsed(turns: list[dict[str, Any]], **fields: Any) -> Any:
    return parse_conversation(json.dumps({"messages": turns, **fields}).encode(), ("<|im_end|>",))


def called(arguments: Any, name: Any = "look") -> list[dict[str, Any]]:
    return [OPENAI[0], {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("reason", "word", "turns", "fields"),
    [
        ("bad_roles", "turn 1 is the tool's where the assistant's", [OPENAI[0], OPENAI[2], OPENAI[4]], {}),
        ("bad_roles", "turn 2 is the tool's where the user's", [OPENAI[0], OPENAI[4], OPENAI[2], OPENAI[4]], {}),
        ("bad_roles", "turn 2 is the assistant's where the tool's", [*OPENAI[:2], OPENAI[4]], {}),
        ("bad_roles", "turn 3 is the user's where the assistant's", [*OPENAI[:3], OPENAI[0], OPENAI[4]], {}),
        ("bad_roles", "the last turn is not the assistant's", OPENAI[:4], {}),
        ("malformed_line", "'arguments' of 'look' are no object", called("[3]"), {}),
        ("malformed_line", "not JSON", called("{at: 3}"), {}),
        ("malformed_line", "no call", called({}, name=None), {}),
        ("malformed_line", "no call", [OPENAI[0], {"role": "assistant", "tool_calls": [7]}], {}),
        ("malformed_line", "not JSON", [OPENAI[0], {"role": "tool_call", "content": "look(3)"}], {}),
        ("malformed_line", "'tools' is no list", OPENAI, {"tools": {"name": "look"}}),
        ("malformed_line", "'tools' is no list", OPENAI, {"tools": "[7]"}),
        ("malformed_line", "is no text", [OPENAI[0], {**OPENAI[4], "reasoning_content": ["a"]}], {}),
        ("unsupported_field", "not the assistant's and has", [{**OPENAI[1], "role": "user"}, OPENAI[4]], {}),
        ("unsupported_field", "'reasoning_content'", [{**OPENAI[0], "reasoning": "Hm"}, OPENAI[4]], {}),
        ("unsupported_field", "'function_call'", [OPENAI[0], {**OPENAI[4], "function_call": {"name": "look"}}], {}),
        ("reserved_words", "turn 1 contains", called({"of": "<|im_end|>"}), {}),
        ("reserved_words", "turn 1 contains", [OPENAI[0], {**OPENAI[4], "reasoning_content": "<|im_end|>"}], {}),
        ("reserved_words", "'tools' contains", OPENAI, {"tools": [{"name": "<|im_end|>"}]}),
        ("reserved_words", "turn 2 contains", [*OPENAI[:2], {"role": "tool", "content": "<|im_end|>"}, OPENAI[4]], {}),
        ("image_mark_mismatch", "1 elsewhere, for 1 images", called({"of": "<image>"}), {"images": ["a.png"]}),
        ("not_utf8", "surrogate", called('{"of": "\\\\ud83d"}'.replace("\\\\", "\\")), {}),
        ("too_many_characters", "limit", called({"of": "a" * 2**20}), {}),
        ("malformed_line", "nested deeper", called(json.loads('{"of": ' * 70 + "1" + "}" * 70)), {}),
    ],
)  # fmt: skip
def test_every_fault_has_a_reason(reason: str, word: str, turns: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as verdict:
        parsed(turns, **fields)
    assert verdict.value.reason == reason
    assert word in verdict.value.detail
    assert len(verdict.value.detail) < 300


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in FAMILIES and name != "paligemma"])
def test_a_template_without_a_form_is_named(root: Path, name: str) -> None:
    opened = maker(root, name)
    for record in ({"messages": OPENAI}, {"tools": [LOOK], "messages": [OPENAI[0], OPENAI[4]]}):
        with pytest.raises(Rejected, match=f"unsupported_field: chat template '{name}' has no form for tools"):
            made(opened, record)
    thought = {"messages": [OPENAI[0], {**OPENAI[4], "reasoning_content": "Hm."}]}
    if chat_template(name).has_reasoning:
        return
    with pytest.raises(Rejected, match=f"'{name}' has no form for reasoning"):
        made(opened, thought)
    silent = {"messages": [OPENAI[0], {**OPENAI[4], "reasoning_content": ""}], "tools": []}
    assert made(opened, silent) == made(opened, {"messages": [OPENAI[0], OPENAI[4]]})


def test_a_result_shows_images_where_the_family_has_a_form_for_it(root: Path) -> None:
    seen = {"role": "tool", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Here."}]}
    record = {"messages": [*OPENAI[:2], seen, OPENAI[4]]}
    assert maker(root, "qwen3-vl").make(Row(1, record)).items[VISION]
    with pytest.raises(Rejected, match=r"unsupported_media: .* 'qwen2\.5-vl' has no form for images in tool"):
        made(maker(root, "qwen2.5-vl"), record)


WITHOUT_TOOLS, QWEN25, QWEN3 = (
    GENERATION.sub("", TEMPLATES[name].read_text()) for name in ("qwen-vl", "qwen2.5-vl", "qwen3-vl")
)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        *(({"chat_template.jinja": TEMPLATES[name].read_text()}, name) for name in FAMILIES),
        ({"tokenizer_config.json": QWEN25}, "qwen2.5-vl"),
        ({"chat_template.json": WITHOUT_TOOLS, "tokenizer_config.json": QWEN25}, "qwen2.5-vl"),
        ({"chat_template.json": WITHOUT_TOOLS}, "qwen-vl"),
        ({"chat_template.json": WITHOUT_TOOLS, "tokenizer_config.json": "{% for"}, "qwen-vl"),
        ({"chat_template.jinja": QWEN3.replace("<tool_response>", "<result>")}, "hermes-2"),
        ({"chat_template.jinja": QWEN3.replace(" | tojson", " | string")}, "hermes-2"),
    ],
)
def test_a_folder_has_the_form_that_its_own_program_writes(tmp_path: Path, files: dict[str, str], name: str) -> None:
    for file, source in files.items():
        (tmp_path / file).write_text(source if file.endswith("jinja") else json.dumps({"chat_template": source}))
    assert folder_template(tmp_path) == (name, next(iter(files)))
