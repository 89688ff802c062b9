"""Templates and masks: the model learns the assistant's words and the end of its turn, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.demo.data import train_tokenizer
from megatron.vlm.data.dataset import expand_runs
from megatron.vlm.data.markup import MARKUPS
from megatron.vlm.data.templates import TEMPLATES, RenderedChat, chat_template, render_chat
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, USER, Call, Message
from megatron.vlm.preprocessing.samples import tokenize
from megatron.vlm.preprocessing.tokenizer import ChatTokenizer, load_tokenizer
from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import Places

INTERNVL = MARKUPS["internvl"]
CHAT = (
    Message(SYSTEM, "Read"),
    Message(USER, "<image>\nRead the digits."),
    Message(ASSISTANT, "a5b3"),
    Message(USER, "Repeat: a5"),
    Message(ASSISTANT, "a5"),
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_tokenizer())
    return load_tokenizer(path, (*chat_template("internlm2-chat").tokens, *INTERNVL.tokens))


AROUND = "<fake_token_around_image>"
WRITTEN = {
    "internlm2-chat": ("internvl", [], "<|im_end|>", (
        "<s><|im_start|>system\nRead<|im_end|>\n"
        "<|im_start|>user\n<img><IMG_CONTEXT></img>\nRead the digits.<|im_end|>\n"
        "<|im_start|>assistant\na5b3<|im_end|>\n"
        "<|im_start|>user\nRepeat: a5<|im_end|>\n<|im_start|>assistant\na5<|im_end|>\n"
    )),
    "gemma": ("gemma", [], "<end_of_turn>", (
        "<bos><start_of_turn>user\nRead\n\n\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
        "\nRead the digits.<end_of_turn>\n<start_of_turn>model\na5b3<end_of_turn>\n"
        "<start_of_turn>user\nRepeat: a5<end_of_turn>\n<start_of_turn>model\na5<end_of_turn>\n"
    )),
    "glm-4.1v": ("glm-4.1v", [], "<|user|>", (
        "[gMASK]<sop><|system|>\nRead<|user|>\n<|begin_of_image|><|image|><|end_of_image|>\nRead the digits."
        "<|assistant|>\na5b3<|user|>\nRepeat: a5<|assistant|>\na5<|user|>"
    )),
    "mistral-v7": ("mistral", [Places(3)], "</s>", (
        "<s>[SYSTEM_PROMPT]Read[/SYSTEM_PROMPT][INST][IMG][IMG_BREAK][IMG][IMG_BREAK][IMG][IMG_END]\nRead the digits."
        "[/INST]a5b3</s>[INST]Repeat: a5[/INST]a5</s>"
    )),
    "smolvlm": ("idefics3", [Places(1, 2, whole=True)], "<end_of_utterance>", (
        f"<|im_start|>System: Read<end_of_utterance>\nUser:{AROUND}<row_1_col_1><image>{AROUND}<row_1_col_2><image>\n"
        f"\n{AROUND}<global-img><image>{AROUND}\nRead the digits.<end_of_utterance>\nAssistant: a5b3"
        "<end_of_utterance>\nUser: Repeat: a5<end_of_utterance>\nAssistant: a5<end_of_utterance>\n"
    )),
}  # fmt: skip
"""Markup, places of the image's features, what ends an answer."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversation_is_written_as_the_models_own_templates_write_it(name: str) -> None:
    markup, places, end, text = WRITTEN[name]
    chat = render_chat(CHAT, chat_template(name), MARKUPS[markup], places)
    assert chat.text == text
    assert [chat.text[start:end] for start, end in chat.trained] == [f"a5b3{end}", f"a5{end}"]


def test_words_of_images_are_reserved() -> None:
    words = {"gemma": {"<start_of_image>"}, "mistral": {"[IMG]", "[IMG_BREAK]", "[IMG_END]"}, "idefics3": {AROUND}}
    assert all(some <= set(MARKUPS[name].reserved) for name, some in words.items())


def test_an_image_of_one_tile_is_the_whole_and_follows_its_opening() -> None:
    text = render_chat(CHAT, chat_template("idefics3"), MARKUPS["idefics3"]).text
    assert f"User:{AROUND}<global-img><image>{AROUND}\nRead" in text


def test_paligemmas_text_begins_behind_the_last_image() -> None:
    question = Message(USER, "<image>\n<image>Which? ")
    chat = render_chat((question, Message(ASSISTANT, "\nb")), chat_template("paligemma"), MARKUPS["paligemma"])
    assert chat.text == "<image>\n<image><bos>Which? \n\nb<eos>"
    assert [chat.text[start:end] for start, end in chat.trained] == ["\nb<eos>"]
    assert [chat.text[:cut] for cut in chat.cuts] == ["<image>\n<image><bos>Which? \n"]


def test_no_token_reaches_across_a_cut(tmp_path: Path) -> None:
    """Two lines are one piece of this tokenizer; the question ends with one and the answer begins with one."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\n": 0, "\n\n": 1, "?": 2, "b": 3}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("\n+"), "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    template = chat_template("paligemma")
    loaded = load_tokenizer(tmp_path / "tokenizer.json", (*template.tokens, "<image>"))
    assert loaded.encode("?\n\nb").ids.tolist() == [2, 1, 3]
    chat = render_chat((Message(USER, "<image>?"), Message(ASSISTANT, "\nb")), template, MARKUPS["paligemma"])
    ids, mask = tokenize(chat, loaded)
    image, bos, eos = (loaded.token_id(token) for token in ("<image>", "<bos>", "<eos>"))
    assert ids.tolist() == [image, bos, 2, 0, 0, 3, eos]
    assert mask.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_the_mask_marks_the_tokens_of_the_trained_characters(tokenizer: ChatTokenizer) -> None:
    ids, mask = tokenize(render_chat(CHAT, chat_template("internlm2-chat"), INTERNVL), tokenizer)
    end = tokenizer.token_id("<|im_end|>")
    words = [tokenizer.encode(text).ids.tolist() for text in ("a5b3", "a5")]
    assert ids[mask == 1].tolist() == [*words[0], end, *words[1], end]


def test_an_image_token_becomes_as_many_as_its_tiles_need_and_none_is_trained(tokenizer: ChatTokenizer) -> None:
    ids, mask = tokenize(render_chat(CHAT, chat_template("internlm2-chat"), INTERNVL), tokenizer)
    image = tokenizer.token_id("<IMG_CONTEXT>")
    longer, longer_mask = expand_runs(ids, mask, [image], [12])
    assert (longer == image).sum() == 12
    assert longer_mask[longer == image].sum() == 0
    assert longer[longer_mask == 1].tolist() == ids[mask == 1].tolist()
    assert longer[longer != image].tolist() == ids[ids != image].tolist()


def test_an_unknown_template_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="internlm2-chat"):
        chat_template("alpaca")


def test_a_turn_that_is_not_trained_is_read_and_not_trained(tokenizer: ChatTokenizer) -> None:
    half = (*CHAT[:2], Message(ASSISTANT, "a5b3", trained=False), *CHAT[3:])
    read, trained = tokenize(render_chat(CHAT, chat_template("internlm2-chat"), INTERNVL), tokenizer)
    ids, mask = tokenize(render_chat(half, chat_template("internlm2-chat"), INTERNVL), tokenizer)
    assert ids.tolist() == read.tolist()
    first = tokenizer.encode("a5b3<|im_end|>").ids
    assert mask.sum() == trained.sum() - len(first)
    assert ids[mask == 1].tolist() == tokenizer.encode("a5<|im_end|>").ids.tolist()


def test_templates_are_one_if_they_write_the_same() -> None:
    written = {
        name: render_chat(CHAT[1:], chat_template(name), INTERNVL)
        for name in ("hermes-2", "chatml", "internlm2-chat", "llama3", "llava-llama3")
    }
    assert written["hermes-2"] == written["chatml"]
    assert written["hermes-2"] != written["internlm2-chat"]
    assert written["llama3"] != written["llava-llama3"]  # another system message


RENDERED = [json.loads(line) for line in (Path(__file__).parent / "rendered_chats.jsonl").read_text().splitlines()]
"""What earlier versions wrote, whose templates were records of openings and ends instead of programs: conversations
with and without images, system messages, tools and reasoning, of odd words."""


def rendered_now(case: dict[str, Any]) -> RenderedChat:
    fields = ({**one, "calls": tuple(Call(*call) for call in one.get("calls", ()))} for one in case["messages"])
    messages = [Message(**{**one, "parts": tuple(one.get("parts", ()))}) for one in fields]
    template = chat_template(case["template"])
    return render_chat(messages, template, MARKUPS["llava"], (), case["tools"], case["default_system"])


def test_datasets_of_earlier_versions_would_be_written_again_as_they_are() -> None:
    assert {case["template"] for case in RENDERED} == set(TEMPLATES)
    for case in RENDERED:
        now = rendered_now(case)
        assert now.text == case["text"], case
        assert [list(trained) for trained in now.trained] == case["trained"], case
        assert list(now.cuts) == case["cuts"], case


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_transformers_runs_each_as_it_is_run_here(name: str) -> None:
    """Text and assistant's characters of `apply_chat_template`, for conversations without images."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chats = [case for case in RENDERED if case["template"] == name and "<image>" not in case["text"]]
    short = [{"role": USER, "words": "What?"}, {"role": ASSISTANT, "words": " A cat.\n"}]
    chats.append({"template": name, "messages": short, "tools": [], "default_system": True})
    for case in chats:
        messages = [
            {"role": one["role"], "content": one["words"]}
            | ({"reasoning_content": one["reasoning"]} if "reasoning" in one else {})
            | {"tool_calls": [{"function": {"name": name, "arguments": given}} for name, given in one.get("calls", ())]}
            for one in case["messages"]
        ]
        if case["messages"][0].get("parts") and name == "gemma4":
            messages[0]["content"] = [{"type": "text", "text": part} for part in case["messages"][0]["parts"]]
        texts, ranges = utils.render_jinja_template(
            [messages],
            tools=[json.loads(tool) for tool in case["tools"]] or None,
            chat_template=TEMPLATES[name].read_text(),
            return_assistant_tokens_mask=True,
            no_default_system=not case["default_system"],
        )
        now = rendered_now({**case, "messages": [{**one, "trained": True} for one in case["messages"]]})
        assert now.text == texts[0]
        assert list(now.trained) == [tuple(one) for one in ranges[0]]
