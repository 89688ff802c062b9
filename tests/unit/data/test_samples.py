"""One line to one sample: limits hold to the token, and system messages come from where they should."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.vlm.data.chat import Rejected
from megatron.vlm.data.demo import train_tokenizer
from megatron.vlm.data.job import open_job
from megatron.vlm.data.preprocess import preprocess
from megatron.vlm.data.samples import Recipe, SampleMaker, expand_images
from megatron.vlm.data.templates import chat_template
from megatron.vlm.data.tiles import Tiling
from omnibal_ext.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer())
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(tmp_path / "two_tiles.png")
    return tmp_path


def maker(root: Path, **changed: Any) -> SampleMaker:
    flags = {"template": "internlm2-chat", "tiling": Tiling(32, max_tiles=4), "tokens_per_tile": 4, **changed}
    return SampleMaker(Recipe(root, root / "tokenizer.model", **flags))


def line(images: int, question: str = "Read", system: str | None = None) -> bytes:
    turns = [{"from": "human", "value": "<image>" * images + question}, {"from": "gpt", "value": "a5"}]
    if system is not None:
        turns.insert(0, {"from": "system", "value": system})
    return json.dumps({"image": ["two_tiles.png"] * images, "conversations": turns}).encode()


def test_a_sample_counts_its_tiles_and_image_tokens(root: Path) -> None:
    opened = maker(root)
    sample = opened.make(line(images=1))
    assert sample.tiles == 3  # two and the thumbnail
    assert (sample.tokens == opened.tokenizer.token_id("<IMG_CONTEXT>")).sum() == 3 * 4


def test_every_image_token_is_repeated_for_its_own_image() -> None:
    tokens, mask = expand_images(np.array([7, 1, 8, 1, 9]), np.array([0, 0, 1, 0, 1], np.uint8), 1, [3, 2])
    assert tokens.tolist() == [7, 1, 1, 1, 8, 1, 1, 9]
    assert mask.tolist() == [0, 0, 0, 0, 1, 0, 0, 1]


def test_the_token_limit_counts_image_tokens_and_is_exact(root: Path) -> None:
    length = len(maker(root).make(line(images=2)).tokens)
    assert len(maker(root, max_tokens=length).make(line(images=2)).tokens) == length
    with pytest.raises(Rejected, match=f"too_many_tokens: {length} tokens, limit {length - 1}"):
        maker(root, max_tokens=length - 1).make(line(images=2))


def test_more_images_than_tiles_are_rejected(root: Path) -> None:
    assert maker(root).make(line(images=4)).tiles == 4
    with pytest.raises(Rejected, match="too_many_images: 5 images, limit 4"):
        maker(root).make(line(images=5))


@pytest.mark.parametrize(
    ("template", "own", "flag", "expected"),
    [
        ("internlm2-chat", None, None, None),
        ("internlm2-chat", None, "Read", "Read"),
        ("internlm2-chat", "Repeat", "Read", "Repeat"),
        ("vicuna", None, None, chat_template("vicuna").system),
        ("vicuna", None, "", None),
        ("vicuna", "Repeat", None, "Repeat"),
    ],
)
def test_system_messages(root: Path, template: str, own: str | None, flag: str | None, expected: str | None) -> None:
    made = maker(root, template=template, system_message=flag).make(line(0, question="a5", system=own))
    same = maker(root, template=template, system_message="").make(line(0, question="a5", system=expected))
    assert made.tokens.tolist() == same.tokens.tolist()


def test_a_hugging_face_tokenizer_serves_several_workers(root: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["Read a5"], trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "chat.jsonl").write_bytes(b"\n".join([line(1), line(2)] * 20))
    recipe = Recipe(root, root / "tokenizer.json", "llama3", Tiling(32), 4)
    one = preprocess(open_job([root / "chat.jsonl"], recipe, root / "one", lines_per_part=5))
    two = preprocess(open_job([root / "chat.jsonl"], recipe, root / "two", lines_per_part=5), workers=2)
    assert one == two
    assert one["samples"] == 40
    assert (root / "one" / "tokens.bin").read_bytes() == (root / "two" / "tokens.bin").read_bytes()


def test_llavas_data_have_no_id_that_llava_lacks(root: Path) -> None:
    opened = maker(root, template="vicuna", markup="llava")
    plain = maker(root, template="vicuna")
    added = {"<img>", "</img>", "<IMG_CONTEXT>"} & set(opened.special_tokens)
    assert not added
    assert opened.tokenizer.vocab_size < plain.tokenizer.vocab_size + 9
    sample = opened.make(line(1))
    assert (sample.tokens == opened.tokenizer.token_id("<image>")).sum() == 3 * 4
    assert sample.loss_mask[sample.tokens == opened.image_token_id].sum() == 0


def test_a_template_without_a_system_turn_refuses_one(root: Path) -> None:
    with pytest.raises(Rejected, match="bad_roles: chat template 'mistral' has no system turn"):
        maker(root, template="mistral").make(line(0, system="Read"))
    with pytest.raises(UserError, match="'mistral' has no system turn; leave --system-message out"):
        maker(root, template="mistral", system_message="Read")


def test_a_strip_that_cannot_become_a_square_is_rejected(root: Path) -> None:
    Image.new("1", (40_000, 2)).save(root / "two_tiles.png")
    for rule in ("pad", "crop"):
        with pytest.raises(Rejected, match="too_many_pixels"):
            maker(root, tiling=Tiling(336, rule=rule)).make(line(1))
