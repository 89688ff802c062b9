"""A folder's own program is run: its text, and of it the answers and the token behind each are trained."""

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.data.chat_program import GENERATION
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.templates import ChatTemplate, chat_template, render_chat
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, TOOL, USER, Call, Message
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.folder_template import folder_template, open_template
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.registry import MARKUPS, TEMPLATES
from tests.demo import byte_level, turns, written
from tests.unit.preprocessing.test_tool_turns import FAMILIES, drawn

pytest.importorskip("transformers")
from transformers.utils.chat_template_utils import render_jinja_template

tokenizers = pytest.importorskip("tokenizers")

Opened = Callable[[str], ChatTemplate]
SPECIAL = [
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|start|>", "<|tool|>", "<turn_end>", "[INST]", "[/INST]",
]  # fmt: skip
# Programs in the manner of those that are published: with what is trained of the conversation below.
EACH = "{% for m in messages %}"
PROMPT = "{% if add_generation_prompt %}{{ PROMPT }}{% endif %}"
PROGRAMS = {
    # Llama 2's: the system message stands in the first question, words are stripped, a space is in front of the end.
    "system within the question": (
        "{% set system = messages[0].content if messages[0].role == 'system' %}"
        "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '') }}"
        "{{ m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}",
        ["A cat. </s>", "Yes. </s>"],
    ),
    # Zephyr's.
    "eos behind everybody": (
        EACH + "{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
        + PROMPT.replace("PROMPT", "'<|assistant|>\\n'"),
        ["  A cat. \n</s>", "Yes.</s>"],
    ),
    # PaddleOCR-VL's: where nothing is said of a prompt, there is one; transformers says that there is none.
    "a prompt unless told otherwise": (
        "{% if add_generation_prompt is not defined %}{% set add_generation_prompt = true %}{% endif %}"
        + EACH + "{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}{% endfor %}"
        + PROMPT.replace("PROMPT", "'<|assistant|>\\n'") + "{% if documents is defined %}{% else %}?{% endif %}",
        ["  A cat. \n</s>", "Yes.</s>"],
    ),
    # Falcon's: nothing ends an answer.
    "no end": (
        EACH + "{{ '\\n\\n' + m.role.title() + ': ' + m.content.strip() }}{% endfor %}"
        + PROMPT.replace("PROMPT", "'\\n\\nAssistant:'"),
        [" A cat.", " Yes."],
    ),
    # GLM's: who asks next ends an answer.
    "the next question's mark": (
        EACH + "{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}" + PROMPT.replace("PROMPT", "'<|assistant|>\\n'"),
        ["  A cat. \n<|user|>", "Yes.<|user|>"],
    ),
    # A reasoning model's: tags in front of every answer, earlier reasoning dropped.
    "reasoning": (
        EACH + "{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{% if loop.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
        "{{ m.content.split('</think>')[-1] + '<|end|>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        + PROMPT.replace("PROMPT", "'<|assistant|><think>'"),
        ["  A cat. \n<|end|>", "<think>Hm.</think>Yes.<|end|>"],
    ),
    # A processor's, whose contents are lists.
    "lists": (
        EACH + "{{ '<|' + m.role + '|>' }}{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}",
        ["  A cat. \n<|end|>", "Yes.<|end|>"],
    ),
    # Nothing stands between a question and its answer.
    "no opening": (
        EACH + "{{ m.content ~ ('<|end|>' if m.role == 'assistant') }}{% endfor %}",
        ["  A cat. \n<|end|>", "Yes.<|end|>"],
    ),
    # No prompt, and results of tools that end otherwise than questions.
    "headers": (
        EACH + "{{ '<tool>' ~ m.content ~ '</tool>\n' if m.role == 'tool' else '<|' ~ m.role ~ '|>\n' ~ m.content ~ "
        "'<|end|>\n' }}{% endfor %}",
        ["  A cat. \n<|end|>", "Yes.<|end|>"],
    ),
    # With transformers' tags, and the end behind them.
    "tags": (
        EACH + "{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}",
        ["  A cat. \n<|end|>", "Yes.<|end|>"],
    ),
}  # fmt: skip
ASKED = (Message(USER, "<image>What is it?"), Message(ASSISTANT, "  A cat. \n"), Message(USER, "Sure?"))


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    added = {str(number): {"content": token, "special": True} for number, token in enumerate(SPECIAL)}
    config = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def of(program: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_text(program)
        found = folder_template(tmp_path)
        assert found == (str(tmp_path / "chat_template.jinja"), "chat_template.jinja")
        return open_template(found[0], tmp_path / "tokenizer.json")

    return of


@pytest.mark.parametrize("kind", list(PROGRAMS))
@pytest.mark.parametrize("system", [(), (Message(SYSTEM, "Be brief."),)])
def test_answers_and_their_ends_are_found(opened: Opened, kind: str, system: tuple[Message, ...]) -> None:
    program, trained = PROGRAMS[kind]
    answer = Message(ASSISTANT, "Yes.", reasoning="Hm." if kind == "reasoning" else None)
    chat = render_chat((*system, *ASKED, answer), opened(program), MARKUPS["qwen-vl"])
    assert [chat.text[start:end] for start, end in chat.trained] == trained
    assert "<|vision_start|><|image_pad|><|vision_end|>What" in chat.text
    assert chat.text.count("Be brief.") == len(system)
    assert chat.text.rstrip().endswith(trained[-1].rstrip())  # no prompt to answer stands behind


def test_the_last_answer_ends_as_the_others_do(opened: Opened) -> None:
    template = opened(PROGRAMS["the next question's mark"][0])
    assert render_chat((*ASKED, Message(ASSISTANT, "Yes.")), template, MARKUPS["llava"]).text.endswith("Yes.<|user|>")
    assert template.end_of_turn == "<|user|>"
    assert opened(PROGRAMS["no end"][0]).end_of_turn == "</s>"


APART = ("glm-4.5v", "idefics3", "smolvlm", "paligemma")
"""Of ours: tags of reasoning that are always written are no prompt's; programs that look at what a message begins with;
a line break alone in front of answers, which may begin with others."""


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in APART])
def test_marks_find_what_tags_say(name: str) -> None:
    ours, thinks = chat_template(name), chat_template(name).has_reasoning
    own = ChatTemplate(name, GENERATION.sub("", TEMPLATES[name].read_text()), ours.tokens)
    own.check()
    for seed in range(60):
        record = drawn(seed, thinks, False)
        if name not in FAMILIES:
            said = [one for one in record["messages"] if "tool_calls" not in one and one["role"] != TOOL]
            record = {"messages": said}
        if "<tool_response>" in json.dumps([one for one in record["messages"] if one["role"] == USER]):
            continue  # Qwen's programs look for it at the beginning
        if name == "mistral":
            record["messages"] = [one for one in record["messages"] if one["role"] != SYSTEM]
        read = parse_conversation(record, ())
        wanted = render_chat(read.messages, ours, MARKUPS["llava"], (), read.tools)
        assert render_chat(read.messages, own, MARKUPS["llava"], (), read.tools) == wanted, record


def test_calls_are_trained_up_to_their_end(opened: Opened) -> None:
    program = (
        "{% for tool in tools or [] %}{{ '<|system|>' ~ (tool | tojson) ~ '<|end|>' }}{% endfor %}"
        + EACH + "{{ '<|' + m.role + '|>' + m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '<|tool|>' ~ call.function.name ~ (call.function.arguments | tojson) }}{% endfor %}{{ END }}{% endfor %}"
    )  # fmt: skip
    tool = '{"type": "function", "function": {"name": "look"}}'
    calls = (Call("look", {"at": 3}), Call("look", {}))
    messages = (ASKED[0], Message(ASSISTANT, "I look.", calls=calls), Message(TOOL, "far"), Message(ASSISTANT, "Far."))
    template = opened(program.replace("END", "'<|end|>'"))
    assert template.has_tools
    assert not template.has_reasoning
    chat = render_chat(messages, template, MARKUPS["llava"], (), [tool])
    assert [chat.text[start:end] for start, end in chat.trained] == [
        'I look.<|tool|>look{"at": 3}<|tool|>look{}<|end|>', "Far.<|end|>"
    ]  # fmt: skip
    otherwise = opened(program.replace("END", "'<turn_end>' if m.tool_calls else '<|end|>'"))
    with pytest.raises(Rejected, match=r"unsupported_field: .* does not end calls as it ends answers"):
        render_chat(messages, otherwise, MARKUPS["llava"], (), [tool])


USER_TURN = EACH + "{% if m.role == 'user' %}[INST] PARTS[/INST]{% else %}{{ m.content[0].text }}</s>{% endif %}"
SHOWN = "{% for part in BLOCKS %}{{ IMAGE if part.type == 'image' else part.text | trim }}{% endfor %}"
KIND = "m.content | selectattr('type', 'equalto', 'NAME')"
IMAGES = {
    "LLaVA": SHOWN.replace("BLOCKS", KIND.replace("NAME", "image")).replace("IMAGE", "'<image>\n'")
    + SHOWN.replace("BLOCKS", KIND.replace("NAME", "text")),
    "Ministral 3": "{% set blocks = m.content | sort(attribute='type') if m.content | length == 2 else m.content %}"
    + SHOWN.replace("BLOCKS", "blocks").replace("IMAGE", "'[IMG]'"),
    "Gemma 3": SHOWN.replace("BLOCKS", "m.content").replace("IMAGE", "'<start_of_image>'"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_parts_are_written_as_the_program_writes_them(opened: Opened, name: str) -> None:
    """Images in places of its own, texts trimmed apart."""
    program = USER_TURN.replace("PARTS", IMAGES[name]) + "{% endfor %}"
    template = opened(program)
    assert template.images_first == (name == "LLaVA")
    said = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "One "}, {"type": "text", "text": "\nTwo"}]
    for parts in (order for count in (1, 2, 3) for order in permutations([*said, said[0]], count)):
        chat = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": [said[1]]}]
        read = parse_conversation({"messages": chat}, (), "\n", first=bool(template.images_first))
        (text,), _ = render_jinja_template([chat], chat_template=program)
        for image in ("[IMG]", "<start_of_image>"):
            text = text.replace(image, "<image>")
        assert render_chat(read.messages, template, MARKUPS["llava"]).text == text, parts
    chat = [{"role": "user", "content": said}, {"role": "assistant", "content": [said[1]]}]
    beside = [{"role": "user", "content": said[1:]}, chat[1]]  # images in a column of their own, as TRL has them
    one, other = (
        render_chat(parse_conversation(record, (), "\n").messages, template, MARKUPS["llava"]).text
        for record in ({"messages": chat}, {"messages": beside, "images": ["a.png"]})
    )
    assert one == other


def test_a_header_behind_a_result_is_not_trained(opened: Opened) -> None:
    messages = (ASKED[0], Message(ASSISTANT, "I look."), Message(TOOL, "far"), Message(ASSISTANT, "Far."))
    chat = render_chat(messages, opened(PROGRAMS["headers"][0]), MARKUPS["llava"])
    assert [chat.text[start:end] for start, end in chat.trained] == ["I look.<|end|>", "Far.<|end|>"]


def asked_for(template: ChatTemplate, *parts: str) -> str:
    message = Message(USER, "".join(parts), parts=parts)
    return render_chat((message, Message(ASSISTANT, "Yes.")), template, MARKUPS["qwen-vl"]).text


PARTS = (
    EACH + "{{ '<|' ~ m.role ~ '|>' }}{% if m.content is string %}{{ m.content }}{% else %}BODY{% endif %}"
    "<|end|>{% endfor %}"
)
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


def test_what_a_program_writes_for_media_is_told_apart(opened: Opened) -> None:
    """An image for whatever it does not know; a number in front of each; images behind all words; one alone."""
    other = "{% for c in m.content %}{{ c.text if c.type == 'text' else '<IMG>' }}{% endfor %}"
    assert SEEN + "What" in asked_for(opened(PARTS.replace("BODY", other)), "<image>", "What")
    numbered = other.replace("'<IMG>'", "'Picture ' ~ loop.index ~ ': <IMG>'")
    template = opened(PARTS.replace("BODY", numbered))
    assert f"Picture 1: {SEEN}Picture 2: {SEEN}What" in asked_for(template, "<image>", "<image>", "What")
    kind = "{% for c in m.content | selectattr('type', 'equalto', 'KIND') %}{{ c.text or '<IMG>' }}{% endfor %}"
    last = opened(PARTS.replace("BODY", kind.replace("KIND", "text") + kind.replace("KIND", "image")))
    assert last.images_first is False
    assert "What" + SEEN in asked_for(last, "<image>", "What")
    one = "{% if m.content | length > 2 %}{{ raise_exception('one image only') }}{% endif %}" + other
    assert SEEN + "What" in asked_for(opened(PARTS.replace("BODY", one)), "<image>", "What")


def test_a_text_that_is_a_mark_is_a_text_to_a_program_of_lists(opened: Opened) -> None:
    program = (
        EACH
        + "{{ '<|' ~ m.role ~ '|>' }}{% for c in m.content %}{{ c.text or '<IMG>' }}{% endfor %}<|end|>{% endfor %}"
    )
    chat = (Message(USER, "<image>"), Message(ASSISTANT, "Yes."))
    assert SEEN in render_chat(chat, opened(program), MARKUPS["qwen-vl"]).text


def test_ours_is_taken_for_a_folder_s_own_if_it_writes_images_alike(opened: Opened, tmp_path: Path) -> None:
    source = TEMPLATES["gemma"].read_text().replace("'<image>'", "'<start_of_image>'")
    for change, named in (("", "gemma"), ("\\n", str(tmp_path / "chat_template.jinja"))):
        (tmp_path / "chat_template.jinja").write_text(source.replace("<start_of_image>", f"{change}<start_of_image>"))
        assert (folder_template(tmp_path, MARKUPS["gemma"]) or ("",))[0] == named
    assert (folder_template(tmp_path) or ("",))[0] == "gemma"


def test_a_text_s_only_image_is_put_first_as_llava_s_own_programs_do() -> None:
    def read(words: str, first: bool) -> str:
        record = {"conversations": turns(words, "Yes."), "images": ["a.png"] * words.count("<image>")}
        return parse_conversation(record, (), "\n", first=first).messages[0].words

    assert read("What is it? <image>", True) == read("What is <image>it?", True) == "<image>\nWhat is it?"
    for words in ("<image>What?", "<image>\nWhat?", "\n<image>What?", "From <image> to <image>", "What?"):
        assert read(words, True) == words
    assert read("What is it? <image>", False) == "What is it? <image>"
    assert MARKUPS["llava"].first
    assert not MARKUPS["qwen-vl"].first


def test_calls_behind_results_are_trained_from_their_first_token(opened: Opened) -> None:
    """Mistral's program: nothing opens an answer but what stands before it."""
    program = (
        "{{ tools | tojson if tools }}"
        + EACH
        + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
        "<|tool|>{{ m.content }}<|end|>{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<|start|>{{ call.function.name ~ (call.function.arguments | tojson) }}{% endfor %}</s>{% endif %}{% endfor %}"
    )
    call = (Call("look", {"at": 3}),)
    messages = (ASKED[0], *(Message(ASSISTANT, "", calls=call), Message(TOOL, "far")) * 2, Message(ASSISTANT, "Far."))
    chat = render_chat(messages, opened(program), MARKUPS["llava"], (), ['{"type": "function", "function": {}}'])
    said = '<|start|>look{"at": 3}</s>'
    assert [chat.text[start:end] for start, end in chat.trained] == [said, said, "Far.</s>"]


CHATML = EACH + "{{ '<|' + m.role + '|>' + WORDS + '<|end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (CHATML.replace("WORDS", "m.content.upper()"), "does not write a question and its answer as they are"),
        (CHATML.replace("WORDS", "m.content ~ m.content | length"), "changes or mixes what is said"),
        (CHATML.replace("WORDS", "m.content + strftime_now('%d')"), "writes the day's date"),
        ("{{ raise_exception('never') }}", "does not write a question"),
        ("{{ messages.__class__.__mro__ }}", "does not write a question and its answer"),  # the sandbox holds
        ("{% for x in y", "is no chat template"),
    ],
)
def test_a_program_that_is_not_understood_is_named(opened: Opened, tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        opened(program)
    assert str(tmp_path / "chat_template.jinja") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_conversation_that_would_be_changed_is_rejected(opened: Opened) -> None:
    said = "{{ '<|' + m.role + '|>' + m.content + MORE'<|end|>' }}"
    template = opened(EACH + "{% if loop.index < 5 %}" + said.replace("MORE", "") + "{% endif %}{% endfor %}")
    longer = (*ASKED, Message(ASSISTANT, "Yes."), ASKED[2], Message(ASSISTANT, "No."))
    with pytest.raises(Rejected, match=r"unsupported_field: .* leaves out turn 4"):
        render_chat(longer, template, MARKUPS["llava"])
    marked = (*ASKED, Message(ASSISTANT, "\U00100001"))
    with pytest.raises(Rejected, match="reserved_words"):
        render_chat(marked, template, MARKUPS["llava"])
    twice = opened(EACH + said.replace("MORE", "(m.content if 'image' in m.content else '') + ") + "{% endfor %}")
    with pytest.raises(Rejected, match=r"unsupported_media: .* writes other images"):
        render_chat((*ASKED, Message(ASSISTANT, "Yes.")), twice, MARKUPS["llava"])


def test_the_day_s_date_is_in_no_dataset(opened: Opened) -> None:
    """As a default system message of Mistral's has it; with one of the user's nothing is lost."""
    template = opened(
        "{% if messages[0].role != 'system' %}{{ '<|system|>' + strftime_now('%d') }}{% endif %}"
        + CHATML.replace("WORDS", "m.content")
    )
    chat = (*ASKED, Message(ASSISTANT, "Yes."))
    assert render_chat((Message(SYSTEM, "Be brief."), *chat), template, MARKUPS["llava"]).trained
    with pytest.raises(Rejected, match="day's date"):
        render_chat(chat, template, MARKUPS["llava"])


def dataset(folder: Path, name: str, template: str, system: str | None = None) -> dict[str, Any]:
    recipe = Recipe(None, folder / "tokenizer.json", template, Tiling(32), system_message=system)
    return preprocess(open_job([folder / "chat.jsonl"], recipe, folder / name))


def test_a_dataset_says_which_program_wrote_it(opened: Opened, tmp_path: Path) -> None:
    """Its file's name does not matter, its content does."""
    tokenizer = byte_level(["Yes."])
    tokenizer.add_special_tokens(["<s>", "</s>", *SPECIAL])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    written(tmp_path / "chat.jsonl", {"conversations": turns("What?", "Yes.")})
    opened(CHATML.replace("WORDS", "m.content"))
    program = tmp_path / "chat_template.jinja"
    made = dataset(tmp_path, "a", str(program))
    assert made["chat_template"] == str(program)
    assert made["eos_token_id"] == made["special_tokens"]["<|end|>"]
    assert list(made["special_tokens"])[:4] == ["</s>", "<|assistant|>", "<|end|>", "<|system|>"]
    copy = program.rename(tmp_path / "same.jinja")
    assert dataset(tmp_path, "a", str(copy)) == made  # it is there already
    copy = tmp_path / "other.jinja"
    copy.write_text(CHATML.replace("WORDS", "' ' + m.content"))
    with pytest.raises(UserError, match="holds a dataset made otherwise"):
        dataset(tmp_path, "a", str(copy))
    assert dataset(tmp_path, "b", str(copy))["chat_program"] != made["chat_program"]
    with pytest.raises(UserError, match='decides on system messages itself; leave --system-message "" out'):
        dataset(tmp_path, "d", str(copy), "")
    with pytest.raises(UserError, match=r"nothing\.jinja: has no chat template"):
        dataset(tmp_path, "d", str(tmp_path / "nothing.jinja"))
