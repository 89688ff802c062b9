"""Tokenizers: special tokens are one id each, wherever that id comes from."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from examples.demo.data import train_tokenizer
from megatron.vlm.preprocessing.tokenizer import TokenizedText, load_tokenizer
from omnibal_ext.errors import UserError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_tokenizer())
    return path


def test_tokens_missing_in_the_file_follow_its_vocabulary_and_are_one_id_each(model: Path) -> None:
    plain = load_tokenizer(model, ["<img>"])
    more = load_tokenizer(model, ["<img>", "<first>", "<second>", "<first>"])
    assert more.token_id("<img>") == plain.token_id("<img>") < plain.vocab_size == more.token_id("<first>")
    assert more.token_id("<second>") + 1 == more.vocab_size == plain.vocab_size + 2
    encoding = more.encode("a5<first>b3")
    assert encoding.ids.tolist().count(more.token_id("<first>")) == 1
    assert encoding.starts.tolist() == [0, 1, 2, 9, 10]
    assert encoding.ends.tolist() == [1, 2, 9, 10, 11]


def declared(model: Path, decoder: dict[str, Any], **named: Any) -> None:
    (model.parent / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder} | named))


def test_of_tokens_that_begin_alike_the_longest_is_read(model: Path) -> None:
    for tokens in (["<a>", "<a><b>"], ["<a><b>", "<a>"]):
        tokenizer = load_tokenizer(model, tokens)
        long, short = tokenizer.token_id("<a><b>"), tokenizer.token_id("<a>")
        assert tokenizer.encode("<a><b><a>").ids.tolist() == [long, short]


def test_tokens_that_the_models_folder_declares_keep_their_ids(model: Path) -> None:
    size = load_tokenizer(model, []).vocab_size
    (model.parent / "added_tokens.json").write_text(json.dumps({"<other>": size + 4}))
    declared(model, {"5": {"content": "<renamed>", "special": True}})
    tokenizer = load_tokenizer(model, special := ["<renamed>", "<other>", "<new>"])
    assert [*map(tokenizer.token_id, special), tokenizer.vocab_size] == [5, size + 4, size + 5, size + 6]
    assert tokenizer.encode("a<renamed>").ids.tolist()[1:] == [5]


def test_a_range_covers_the_tokens_that_hold_a_character_of_it() -> None:
    # "ab" as one token, a character in three bytes (its range on the last of them), "c".
    encoding = TokenizedText.of([1, 2, 3, 4, 5], [(0, 2), (2, 2), (2, 2), (2, 3), (3, 4)])
    wanted = {(0, 1): [0], (1, 2): [0], (2, 3): [1, 2, 3], (1, 4): [0, 1, 2, 3, 4], (3, 4): [4]}
    for (begin, end), tokens in wanted.items():
        assert np.flatnonzero(encoding.covers(begin, end)).tolist() == tokens


@pytest.mark.parametrize(("name", "content"), [("x.model", b"no model"), ("x.json", b"{}"), ("x.json", b"no JSON")])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        load_tokenizer(tmp_path / name, [])


def test_a_vocabulary_has_one_name_in_every_file_format(model: Path) -> None:
    """And another one where two pieces are exchanged."""
    tokenizers, beside = pytest.importorskip("tokenizers"), model.with_name("tokenizer.json")
    pieces, ours = sentencepiece.SentencePieceProcessor(model_file=str(model)), load_tokenizer(model, ["<x>"])
    names = [pieces.id_to_piece(number) for number in range(pieces.vocab_size())]
    for order, same in ((names, True), ([names[1], names[0], *names[2:]], False)):
        tokenizers.Tokenizer(tokenizers.models.BPE({name: n for n, name in enumerate(order)}, [])).save(str(beside))
        theirs = load_tokenizer(beside, ["<x>"])
        assert ours.vocabulary_size == theirs.vocabulary_size == len(names)
        assert (ours.vocabulary_hash() == theirs.vocabulary_hash()) == same


def test_what_begins_ends_and_fills_a_text_is_reserved_and_other_tokens_are_words(model: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    added = [("<|tool|>", True), ("<plain>", False), ("  ", True), ("<|end|>", True), ("<|pad|>", True), ("e", False)]
    decoder = {str(300 + i): {"content": token, "special": special} for i, (token, special) in enumerate(added)}
    declared(model, decoder, eos_token="<|end|>", pad_token={"content": "<|pad|>"}, bos_token="e")
    assert load_tokenizer(model, []).reserved == {"<|end|>", "<|pad|>"}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    for token, special in added:
        theirs.add_tokens([tokenizers.AddedToken(token, special=special)])
        if special:
            theirs.add_special_tokens([tokenizers.AddedToken(token, special=True)])
    theirs.save(str(model.with_name("tokenizer.json")))
    assert load_tokenizer(model.with_name("tokenizer.json"), ["<s>"]).reserved == {"<|end|>", "<|pad|>"}


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_token_that_takes_more_than_its_characters_is_reserved_in_sentencepiece_files(model: Path, flag: str) -> None:
    declared(model, {"300": {"content": "<mask>", flag: True}, "301": {"content": "<mine>", flag: False}})
    assert load_tokenizer(model, []).reserved == {"<mask>"}


@pytest.mark.parametrize("added", [{"<a>": -1}, {"<a>": "5"}, {"<a>": 2**40}, [], {"<a>": None}])
def test_declared_tokens_without_a_possible_id_are_refused(model: Path, added: object) -> None:
    (model.parent / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(UserError, match=r"added_tokens\.json"):
        load_tokenizer(model, [])


def test_a_special_tokens_second_name_is_reserved_too(model: Path) -> None:
    """The file's own piece for a token that the folder calls otherwise; a piece that no words become is not."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 20), model_writer=written, vocab_size=40, model_type="bpe",
        hard_vocab_limit=False, user_defined_symbols=["[UNUSED_TOKEN_145]"], minloglevel=2,
    )  # fmt: skip
    model.write_bytes(written.getvalue())
    number = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()).piece_to_id("[UNUSED_TOKEN_145]")
    declared(model, {str(number): {"content": "<|im_end|>", "special": True}, "1": {"content": "<word>"}})
    tokenizer = load_tokenizer(model, ["<|im_end|>"])
    assert number in tokenizer.encode("[UNUSED_TOKEN_145]").ids
    assert tokenizer.reserved == {"[UNUSED_TOKEN_145]"}
