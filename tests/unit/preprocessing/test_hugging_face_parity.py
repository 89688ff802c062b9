"""Templates, tokens and masks are those of Hugging Face's `apply_chat_template`, token for token."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.templates import chat_template, render_chat
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, USER, Message
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.folder_template import folder_template
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import SampleMaker, tokenize
from megatron.vlm.preprocessing.tokenizer import load_tokenizer
from omnibal_ext.errors import Rejected
from omnibal_ext.families.registry import MARKUPS, TEMPLATES
from tests.demo import byte_level, turns

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAMES = ("internlm2-chat", "hermes-2", "chatml", "hermes-2-llama3", "llama3", "llava-llama3", "mistral", "vicuna")
MARKUP_OF = {"llava-llama3": "llava", "mistral": "llava", "vicuna": "llava"}

CHATS = [
    [(USER, "What is in the picture?"), (ASSISTANT, "A cat, asleep.")],
    [(SYSTEM, "You are kind."), (USER, "Hi"), (ASSISTANT, "Hello!"), (USER, "And?"), (ASSISTANT, "Nothing.")],
    [(USER, "  spaces   and\ttabs \n\n"), (ASSISTANT, "\n\n  kept or stripped \n")],
    [(USER, "Übergrößen: 書生·浦語 🐈‍⬛"), (ASSISTANT, "🐈‍⬛ 書生")],
    [(USER, "def f(x):\n    return x"), (ASSISTANT, "```python\nf(1)\n```")],
    [(USER, "1234567 + 1"), (ASSISTANT, "8"), (USER, "assistant user system USER: ASSISTANT:"), (ASSISTANT, "</b>")],
]
TEXTS = [
    *(words for chat in CHATS for _, words in chat if words.isascii()),
    "system user assistant USER: ASSISTANT:",
] * 5
"""ASCII alone, so that the other characters fall back to bytes."""


def metaspace() -> Any:
    """As Llama 2's and Vicuna's: spaces are written out, what is unknown falls back to bytes."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = written_spaces(True)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece_model(dummy_prefix: bool) -> bytes:
    """A byte-pair model file as Llama 2's (with a dummy prefix) or InternLM2's (without)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.splitlines()]), model_writer=model,
        model_type="bpe", vocab_size=400, hard_vocab_limit=False, byte_fallback=True, add_dummy_prefix=dummy_prefix,
        normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def converted(model: bytes, dummy_prefix: bool) -> Any:
    """The sentencepiece model as Hugging Face runs it: every split of a piece into two pieces is a merge."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {processor.id_to_piece(number): number for number in range(processor.vocab_size())}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocabulary, key=lambda piece: -processor.get_score(vocabulary[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    how = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, **how))
    tokenizer.normalizer = written_spaces(dummy_prefix)
    return tokenizer


def written_spaces(dummy_prefix: bool) -> Any:
    prefix = [tokenizers.normalizers.Prepend("▁")] * dummy_prefix
    return tokenizers.normalizers.Sequence([*prefix, tokenizers.normalizers.Replace(" ", "▁")])


def assert_parity(name: str, tokenizer: Any, ours_file: Path, folder: Path) -> None:
    """Ours, opened from `ours_file`, does what Hugging Face does with `tokenizer`."""
    template, markup = chat_template(name), MARKUPS[MARKUP_OF.get(name, "internvl")]
    special = [*template.tokens, *markup.tokens]
    ours = load_tokenizer(ours_file, special)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "theirs.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "theirs.json"))
    for chat in CHATS:
        if chat[0][0] == SYSTEM and name == "mistral":
            continue
        expected = theirs.apply_chat_template(
            [{"role": role, "content": words} for role, words in chat], chat_template=TEMPLATES[name].read_text(),
            return_dict=True, return_assistant_tokens_mask=True, no_default_system=True,
        )  # fmt: skip
        rendered = render_chat([Message(role, words) for role, words in chat], template, markup, default_system=False)
        ids, mask = tokenize(rendered, ours)
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == expected["assistant_masks"]
        assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize("build", ["bytes", "metaspace", True, False])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_masks_are_hugging_faces(name: str, build: str | bool, tmp_path: Path) -> None:
    """Of a tokenizer.json; of a sentencepiece file with a dummy prefix, as Llama 2's, or without, as InternLM2's."""
    if isinstance(build, bool):
        (tmp_path / "tokenizer.model").write_bytes(model := sentencepiece_model(build))
        assert_parity(name, converted(model, build), tmp_path / "tokenizer.model", tmp_path)
        return
    tokenizer = metaspace() if build == "metaspace" else byte_level(TEXTS, 500, ignore_merges=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert_parity(name, tokenizer, tmp_path / "tokenizer.json", tmp_path)


@pytest.mark.parametrize("as_parts", [(), (USER, ASSISTANT), (SYSTEM, USER)])
@pytest.mark.parametrize("chat", CHATS)
def test_gemma_4s_template_is_known(chat: list[tuple[str, str]], as_parts: tuple[str, ...], tmp_path: Path) -> None:
    """Of a system message given in parts each has a space behind it."""
    jinja = (Path(__file__).parent / "gemma4_like.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(jinja)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    name, _ = folder_template(tmp_path) or ("", "")
    halves = {words: (words[: len(words) // 2], words[len(words) // 2 :]) for role, words in chat if role == SYSTEM}
    messages = [{"role": role, "content": words} for role, words in chat]
    for one in messages:
        if one["role"] in as_parts:
            parts = halves.get(one["content"], (one["content"],))
            one["content"] = [{"type": "text", "text": part} for part in parts]
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    texts, _ = utils.render_jinja_template([messages], chat_template=jinja, bos_token="<bos>")
    ours = parse_conversation({"messages": messages}, ()).messages
    assert render_chat(ours, chat_template(name), MARKUPS["gemma4"]).text == texts[0]


@pytest.mark.parametrize("special", [True, False])
def test_words_that_are_tokens_become_what_hugging_face_makes_of_them(special: bool, tmp_path: Path) -> None:
    """Boxes and references of Qwen's, and a token that a user added; in answers they are trained."""
    own, template, markup = ("<|object_ref_start|>", "<|box_start|>", "<mine>"), chat_template("qwen-vl"), "qwen-vl"
    tokenizer = byte_level(TEXTS, 500, ignore_merges=True)
    for token in own:
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    tokenizer.add_special_tokens([*template.tokens, *MARKUPS[markup].tokens, "<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    words = "A <|object_ref_start|>cat<mine><|box_start|>(1,2),(3, 4) <mine>"
    tiling = Tiling(14, 4, 64, False, "native")
    maker = SampleMaker(Recipe(tmp_path, tmp_path / "tokenizer.json", "qwen-vl", tiling, 1 / 4, markup=markup))
    sample = maker.make(Row(1, {"conversations": turns(f"Where is {words}?", words)}))
    text = f"<|im_start|>user\nWhere is {words}?<|im_end|>\n<|im_start|>assistant\n{words}<|im_end|>\n"
    wanted = theirs(f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{text}")["input_ids"]
    assert sample.tokens.tolist() == wanted
    trained = sample.tokens[sample.loss_mask.astype(bool)]
    assert set(theirs.convert_tokens_to_ids(list(own))) <= set(trained.tolist())
    for word in ("<|im_end|>", "<|im_start|>", "<|vision_end|>", "<|endoftext|>"):
        with pytest.raises(Rejected, match="reserved_words"):
            maker.make(Row(1, {"conversations": turns("Where?", f"A {word}")}))
