"""Templates and masks: the model learns the assistant's words and the end of its turn, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.data.templates import RenderedChat, chat_template, render_chat
from megatron.vlm.data.turns import ASSISTANT, USER, Call, Message
from megatron.vlm.preprocessing.samples import tokenize
from megatron.vlm.preprocessing.tokenizer import load_tokenizer
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MARKUPS, TEMPLATES


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
            [messages], tools=[json.loads(tool) for tool in case["tools"]] or None, return_assistant_tokens_mask=True,
            chat_template=TEMPLATES[name].read_text(), no_default_system=not case["default_system"],
        )  # fmt: skip
        now = rendered_now({**case, "messages": [{**one, "trained": True} for one in case["messages"]]})
        assert now.text == texts[0]
        assert list(now.trained) == [tuple(one) for one in ranges[0]]


def test_words_of_images_are_reserved_and_unknown_templates_refused_with_the_known_ones() -> None:
    words = {"gemma": {"<start_of_image>"}, "mistral": {"[IMG]", "[IMG_BREAK]", "[IMG_END]"}}
    words["idefics3"] = {"<fake_token_around_image>"}
    assert all(some <= set(MARKUPS[name].reserved) for name, some in words.items())
    with pytest.raises(UserError, match="internlm2-chat"):
        chat_template("alpaca")
