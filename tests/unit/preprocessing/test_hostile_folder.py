"""A stranger's folder ends no process, takes no more than a file may, and is refused in a line that names its file."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.data import chat_program
from megatron.vlm.data.templates import ChatTemplate, chat_template
from megatron.vlm.data.turns import ASSISTANT, USER, Message
from megatron.vlm.preprocessing import tokenizer, tokenizer_files
from megatron.vlm.preprocessing.folder_template import folder_template, open_template
from megatron.vlm.preprocessing.tokenizer import HuggingFaceTokenizer, load_tokenizer
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.reading import costs
from tests.demo import byte_level
from tests.fuzz.folder_readers import PROGRAM

tokenizers = pytest.importorskip("tokenizers")
DOUBLING = "{% set ns = namespace(a=V) %}{% for i in range(60) %}{% set ns.a = ns.a OP ns.a %}{% endfor %}"
NESTED = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
LONG = "messages|length > 5"
"""What no conversation is by which templates are tried."""


@pytest.fixture(autouse=True)
def less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer seconds and bytes: what takes them all takes a while."""
    monkeypatch.setattr(costs, "SECONDS", 1)
    monkeypatch.setattr(costs, "BYTES", 2**27)
    monkeypatch.setattr(tokenizer, "SECONDS", 1)
    monkeypatch.setattr(costs.tried, "__defaults__", (1, 2**27))


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


CONFIG = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
PROGRAMS: dict[str, str] = {
    "loops": NESTED,
    "doubling list": DOUBLING.replace("V", "[1]").replace("OP", "+"),
    "doubling text": DOUBLING.replace("V", "'aaaa'").replace("OP", "~"),
    "long constant": "{{ 'a' * 10000000000 }}",
    "power": "{{ 9 ** (10 ** 9) }}",
    "squares": "{% set ns = namespace(a=3) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "rounded": "{{ 5|round(-(10 ** 9)) }}",
    "long number of a text": "{{ ('9' * 10000000)|int(base=16) % 7 }}",
    "number of bytes": "{{ (1).from_bytes([1], 'big') }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "indented": "{{ ('a\n' * 1000)|indent(100000000) }}",
    "drawn": "{{ [1, 2]|random }}", "words": "{{ lipsum() }}",
    "blocks": "{% for a in [1] %}" * 21 + "{% endfor %}" * 21,
    "ifs": "{% if true %}" * 101 + "x" + "{% endif %}" * 101,
    "parentheses": "{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "break": "{% break %}",
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_costs_too_much_is_refused_when_its_folder_is_opened(tmp_path: Path, name: str) -> None:
    write(tmp_path, tokenizer_config__json=CONFIG, chat_template__jinja=PROGRAMS[name] + PROGRAM)
    with pytest.raises(UserError, match=r"chat_template\.jinja") as refusal:
        folder_template(tmp_path)
    assert len(refusal.value.lines) == 1


@pytest.mark.parametrize("name", ["loops", "doubling text", "power", "squares", "number of bytes", "written"])
def test_a_program_that_costs_too_much_for_one_conversation_loses_that_one(tmp_path: Path, name: str) -> None:
    costly = "{{ 'a' * 3000000 }}" if name == "written" else PROGRAMS[name]
    source = f"{{% if {LONG} %}}{costly}{{% endif %}}{PROGRAM}"
    write(tmp_path, tokenizer_config__json=CONFIG, chat_template__jinja=source)
    template = open_template(str(tmp_path / "chat_template.jinja"), tmp_path / "tokenizer.model")
    turns = [Message(USER, "What?"), Message(ASSISTANT, "A cat.")]
    before, _ = template.written(turns * 2)
    costly_or_refused = "costly_template" if name in ("loops", "doubling text", "written") else "unsupported_field"
    with pytest.raises(Rejected) as refusal:
        template.written(turns * 3)
    assert refusal.value.reason == costly_or_refused
    assert template.written(turns * 2)[0] == before


FILES: list[tuple[str, Any]] = [
    ("chat_template.jinja", PROGRAM.encode() + b"\xff"),
    ("chat_template.jinja", PROGRAM + "{# " + "x" * tokenizer_files.MOST_TEMPLATE + " #}"),
    ("chat_template.json", {"chat_template": 7}),
    ("chat_template.json", {"chat_template": [1, 2]}),
    ("chat_template.json", {"chat_template": [{"name": "default"}]}),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"1": 7}}),
    ("tokenizer_config.json", {"bos_token": ["<s>"]}),
    ("tokenizer_config.json", {"eos_token": {"content": {"a": 1}}}),
    ("tokenizer_config.json", {"eos_token": "x" * 70_000}),
    ("tokenizer.json", {"added_tokens": [1, 2]}),
    ("tokenizer.json", {"added_tokens": {"a": 1}}),
    ("tokenizer.json", {"post_processor": [1]}),
    ("tokenizer.json", {"post_processor": {"processors": [1]}}),
    ("tokenizer.json", {"post_processor": {"single": 1}}),
    ("tokenizer.json", {"post_processor": {"single": [{"SpecialToken": 1}]}}),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_fields_around_a_template_are_checked(tmp_path: Path, name: str, content: Any) -> None:
    write(tmp_path, **{"tokenizer_config__json": CONFIG, name.replace(".", "__"): content})
    file = name if name.startswith("chat_template") else "chat_template.jinja"
    if file != name:
        (tmp_path / file).write_text(PROGRAM)
    with pytest.raises(UserError, match=name) as refusal:
        open_template(str(tmp_path / file), tmp_path / "tokenizer.model")
    assert len(str(refusal.value)) < 1000


def changed(**parts: Any) -> bytes:
    whole = json.loads(byte_level(["Read the digits. a7b0"] * 3, 262).to_str())
    return json.dumps({**whole, **parts}).encode()


def added(content: str) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": 300, "content": content, "special": True, **flags}]


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
WORDS = json.loads(changed())["model"]["vocab"]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "nothing replaced": {"normalizer": {**REPLACE, "pattern": {"String": ""}, "content": "xx"}},
    "doublings": {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 40}},
    "no chunks": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "garbage": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAAAAA=="}},
    "huge": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}},
    "no unknown word": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[NONE]"}},
    "large ids": {"model": {**json.loads(changed())["model"], "vocab": {word: n + 2**31 for word, n in WORDS.items()}}},
    "long token": {"added_tokens": added("y" * 2**25)},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_ends_its_process_is_a_line(tmp_path: Path, name: str) -> None:
    write(tmp_path, tokenizer__json=changed(**TOKENIZERS[name]))
    with pytest.raises(UserError, match=r"tokenizer\.json") as refusal:
        load_tokenizer(tmp_path / "tokenizer.json", ["<|im_start|>", "<|im_end|>"])
    assert len(refusal.value.lines) == 1


def test_a_tokenizer_is_tried_once_for_each_version_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    monkeypatch.setattr("megatron.vlm.preprocessing.tokenizer.tried", lambda *work: tries.append(work))
    write(tmp_path, tokenizer__json=changed())
    for count in (1, 1, 2):
        if count == 2:
            write(tmp_path, tokenizer__json=changed(normalizer={**REPLACE, "content": "b"}))
        load_tokenizer(tmp_path / "tokenizer.json", ["<|im_end|>"])
        assert len(tries) == count


def test_a_text_at_which_a_tokenizer_panics_is_rejected(tmp_path: Path) -> None:
    """Beyond what it was tried with."""
    write(tmp_path, tokenizer__json=changed(pre_tokenizer={"type": "FixedLength", "length": 0}))
    opened = HuggingFaceTokenizer(tmp_path / "tokenizer.json", [])
    with pytest.raises(Rejected) as refusal:
        opened.encode("a")
    assert refusal.value.reason == "no_tokens"


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.vlm.preprocessing.tokenizer.MOST_BYTES", 1000)
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(b" " * 1001)
        with pytest.raises(UserError, match="has 1001 bytes, at most 1000"):
            load_tokenizer(tmp_path / name, [])


def test_what_ours_write_stays_within_the_limits() -> None:
    """A conversation of as many characters as one may have."""
    turns = [Message(USER, "a" * 2**19), Message(ASSISTANT, "b" * 2**19)]
    assert len(chat_template("qwen-vl").written(turns)[0]) < chat_program.MOST_WRITTEN
    assert isinstance(ChatTemplate("x", PROGRAM, ["<|im_end|>"]), ChatTemplate)
