"""One line to one sample: limits hold to the token, and system messages come from where they should."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.demo.data import train_tokenizer
from megatron.vlm.data.dataset import expand_runs
from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.rejects import Rejected
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.samples import Recipe, SampleMaker, locate
from omnibal_ext.errors import UserError
from tests.demo import byte_level, demo_recipe, preprocessed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer())
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(tmp_path / "two_tiles.png")
    for tiles in (1, 3, 4):
        Image.fromarray(np.zeros((32, 32 * tiles, 3), np.uint8)).save(tmp_path / f"{tiles}.png")
    return tmp_path


def maker(root: Path, **changed: Any) -> SampleMaker:
    return SampleMaker(demo_recipe(root, max_tiles=4, **changed))


def line(images: int, question: str = "Read", system: str | None = None) -> Row:
    return Row(1, short_line(images, question, system))


def short_line(images: int, question: str = "Read", system: str | None = None) -> bytes:
    turns = [{"from": "human", "value": "<image>" * images + question}, {"from": "gpt", "value": "a5"}]
    if system is not None:
        turns.insert(0, {"from": "system", "value": system})
    return json.dumps({"image": ["two_tiles.png"] * images, "conversations": turns}).encode()


def test_a_sample_counts_its_tiles_and_image_tokens(root: Path) -> None:
    opened = maker(root)
    sample = opened.make(line(images=1))
    assert sample.tiles == 3  # two and the thumbnail
    assert (sample.tokens == opened.tokenizer.token_id("<IMG_CONTEXT>")).sum() == 1  # of the image, not of its features
    assert sample.length == len(sample.tokens) - 1 + 3 * 4


def test_every_image_has_the_tokens_of_its_own_tiles_where_its_mark_is(root: Path) -> None:
    record = {"image": ["1.png", "3.png"], "conversations": [{"from": "human", "value": "<image>Read<image>a5"},
                                                             {"from": "gpt", "value": "a5"}]}  # fmt: skip
    (root / "chat.jsonl").write_text(json.dumps(record))
    data = preprocessed(root, root / "chat.jsonl", root / "data", max_tiles=8)
    tokens, mask = data.sample(0).text
    marks = (tokens == data.manifest["image_token_id"]).astype(int)
    starts, ends = (np.flatnonzero(np.diff(np.concatenate([[0], marks, [0]])) == sign) for sign in (1, -1))
    assert (ends - starts).tolist() == [1 * 4, (3 + 1) * 4]
    assert len(mask) == len(tokens) == data.sizes.tokens[0]
    assert not mask[marks == 1].any()


def test_every_image_token_is_repeated_for_its_own_image() -> None:
    tokens, mask = expand_runs(np.array([7, 1, 8, 1, 9]), np.array([0, 0, 1, 0, 1], np.uint8), [1], [3, 2])
    assert tokens.tolist() == [7, 1, 1, 1, 8, 1, 1, 9]
    assert mask.tolist() == [0, 0, 0, 0, 1, 0, 0, 1]


PALIGEMMA = {"template": "paligemma", "markup": "paligemma", "tiling": Tiling(32, rule="paligemma")}


@pytest.mark.parametrize(
    ("images", "turns", "reason"),
    [
        (0, 1, "no_image: chat template 'paligemma' has no question without an image"),
        (1, 2, "several_turns: 4 turns; chat template 'paligemma' has a question and its answer"),
        (1, 1, ""),
        (2, 1, ""),
    ],
)
def test_a_pair_is_one_question_with_images_and_its_answer(root: Path, images: int, turns: int, reason: str) -> None:
    opened, record = maker(root, **PALIGEMMA), json.loads(short_line(images))
    record["conversations"] *= turns
    record["image"] *= turns
    row = Row(1, json.dumps(record).encode())
    if not reason:
        assert opened.make(row).tiles == images
        return
    with pytest.raises(Rejected, match=reason):
        opened.make(row)


def test_a_system_message_has_no_place_beside_a_pair(root: Path) -> None:
    with pytest.raises(Rejected, match="bad_roles"):
        maker(root, **PALIGEMMA).make(line(images=1, system="Be brief."))


@pytest.mark.parametrize("changed", [{"template": "vicuna"}, {"tiling": Tiling(32, rule="fixed")}], ids=str)
def test_a_pair_and_a_model_that_asks_where_answers_begin_go_together(root: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="leave both out, or give the model's own") as error:
        maker(root, **{**PALIGEMMA, **changed})
    assert "\n" not in str(error.value)


def test_the_token_limit_counts_image_tokens_and_is_exact(root: Path) -> None:
    length = maker(root).make(line(images=2)).length
    assert maker(root, max_tokens=length).make(line(images=2)).length == length
    with pytest.raises(Rejected, match=f"too_many_tokens: {length} tokens, limit {length - 1}"):
        maker(root, max_tokens=length - 1).make(line(images=2))


def test_of_more_images_than_tiles_each_has_one(root: Path) -> None:
    assert maker(root).make(line(images=4)).tiles == 4
    assert maker(root).make(line(images=7)).tiles == 7


def long_line(answers: int, trained: int = 99) -> bytes:
    """A conversation of `answers` questions, each about an image of its own; the first `trained` are learnt."""
    turns: list[dict[str, Any]] = []
    for number in range(answers):
        turns.append({"from": "human", "value": f"<image>Read {number}"})
        turns.append({"from": "gpt", "value": f"a{number}", "loss": number < trained})
    images = [("two_tiles.png", "1.png")[number % 2] for number in range(answers)]
    return json.dumps({"image": images, "conversations": turns}).encode()


@pytest.mark.parametrize(("rule", "most"), [("internvl", 8), ("internvl_each", 4)])
def test_a_longer_sample_gets_as_few_tiles_fewer_as_needed(root: Path, rule: str, most: int) -> None:
    wide = Row(1, json.dumps(json.loads(short_line(images=2)) | {"image": ["4.png", "3.png"]}).encode())
    tiling = Tiling(32, max_tiles=most, rule=rule)
    whole = maker(root, tiling=tiling).make(wide)
    assert whole.tiles == 5 + 4
    for tokens, grids in ((1, [(3, 1), (3, 1)]), (4, [(3, 1), (3, 1)]), (5, [(2, 1), (2, 1)]), (13, [(1, 1), (1, 1)])):
        limit = {"max_tokens": whole.length - tokens, "shorten": ("fewer-tiles",)}
        less = maker(root, tiling=tiling, **limit).make(wide)
        assert [(image.columns, image.rows) for image in less.images] == grids


def test_tiles_that_images_share_are_fewer_for_all(root: Path) -> None:
    tiling = Tiling(32, max_tiles=6)
    whole = maker(root, tiling=tiling).make(line(images=2))
    assert whole.tiles == 6
    assert whole.shortened is None
    less = maker(root, tiling=tiling, max_tokens=whole.length - 1, shorten=("fewer-tiles",)).make(line(images=2))
    assert (less.tiles, less.shortened) == (2, "fewer-tiles")  # one each, of which there is no thumbnail
    assert less.length == whole.length - 4 * 4
    assert less.tokens.tolist() == whole.tokens.tolist()
    least = {"tiling": Tiling(32, min_tiles=2, max_tiles=6), "max_tokens": whole.length - 1}
    with pytest.raises(Rejected, match=f"too_many_tokens: {whole.length} tokens"):
        maker(root, shorten=("fewer-tiles",), **least).make(line(images=2))


def test_a_longer_sample_ends_with_its_last_answer_that_fits(root: Path) -> None:
    """As if the rest had never been said: the same tokens, loss mask and images, cut as they were."""
    tiling = Tiling(32, max_tiles=2 * 4)  # two tiles an image, of four or of one: the share may not grow
    lengths = [maker(root, tiling=tiling).make(Row(1, long_line(answers))).length for answers in (1, 2, 3, 4)]
    for kept in (1, 2, 3):
        for limit in (lengths[kept - 1], lengths[kept] - 1):
            made = maker(root, tiling=tiling, max_tokens=limit, shorten=("truncate",)).make(Row(1, long_line(4)))
            same = maker(root, tiling=tiling).make(Row(1, long_line(kept)))
            assert made.shortened == "truncate"
            assert made.tokens.tolist() == same.tokens.tolist()
            assert made.loss_mask.tolist() == same.loss_mask.tolist()
            assert made.images == same.images
            assert made.length == same.length <= limit
    with pytest.raises(Rejected, match="too_many_tokens"):
        maker(root, tiling=tiling, max_tokens=lengths[0] - 1, shorten=("truncate",)).make(Row(1, long_line(4)))


def test_nothing_is_kept_of_a_conversation_whose_beginning_teaches_nothing(root: Path) -> None:
    turns = json.loads(long_line(3))
    for number in (1, 3):
        turns["conversations"][number]["loss"] = False
    whole = maker(root).make(Row(1, json.dumps(turns).encode())).length
    with pytest.raises(Rejected, match="too_many_tokens"):
        maker(root, max_tokens=whole - 1, shorten=("truncate",)).make(Row(1, json.dumps(turns).encode()))


def test_ways_are_tried_in_the_order_given_and_counted(root: Path) -> None:
    tiling = Tiling(32, max_tiles=8)
    lengths = {
        name: maker(root, tiling=tiling).make(Row(1, text)).length
        for name, text in (("two", long_line(2)), ("one", long_line(1)))
    }
    flags: dict[str, Any] = {"tiling": tiling, "max_tokens": lengths["two"] - 1}
    for first, second in (("fewer-tiles", "truncate"), ("truncate", "fewer-tiles")):
        assert maker(root, shorten=(first, second), **flags).make(Row(1, long_line(2))).shortened == first
    (root / "chat.jsonl").write_bytes(b"\n".join([long_line(2), long_line(1), long_line(4), long_line(2)]))
    data = preprocessed(root, root / "chat.jsonl", root / "short", shorten=("fewer-tiles", "truncate"), **flags)
    assert data.manifest["shortened"] == {"fewer-tiles": 2, "truncate": 1}
    assert data.manifest["samples"] == 4
    lengths_found = [len(data.sample(sample).text[0]) for sample in range(4)]
    assert data.sizes.tokens.tolist() == lengths_found
    assert max(lengths_found) < lengths["two"]
    with np.load(root / "short/sizes.npz") as arrays:
        assert arrays["supervised"].tolist() == [int(data.sample(sample).text[1].sum()) for sample in range(4)]


VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)


@pytest.mark.parametrize(
    ("template", "own", "flag", "expected"),
    [
        ("internlm2-chat", None, None, None),
        ("internlm2-chat", None, "Read", "Read"),
        ("internlm2-chat", "Repeat", "Read", "Repeat"),
        ("vicuna", None, None, VICUNA),
        ("vicuna", None, "", None),
        ("vicuna", "Repeat", None, "Repeat"),
    ],
)
def test_system_messages(root: Path, template: str, own: str | None, flag: str | None, expected: str | None) -> None:
    made = maker(root, template=template, system_message=flag).make(line(0, question="a5", system=own))
    same = maker(root, template=template, system_message="").make(line(0, question="a5", system=expected))
    assert made.tokens.tolist() == same.tokens.tolist()


def test_a_hugging_face_tokenizer_serves_several_workers(root: Path) -> None:
    pytest.importorskip("tokenizers")
    byte_level(["Read a5"]).save(str(root / "tokenizer.json"))
    (root / "chat.jsonl").write_bytes(b"\n".join([short_line(1), short_line(2)] * 20))
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
    assert (sample.tokens == opened.tokenizer.token_id("<image>")).sum() == 1
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


def test_a_whole_path_counts_from_the_root_by_either_of_its_names(tmp_path: Path) -> None:
    row, root = Row(1, b""), tmp_path / "images"
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    for folder in (root, tmp_path / "link"):
        for path in (root / "a/b.png", f"file://{root}/a/b.png", folder / "a/b.png", "a/b.png"):
            assert locate(str(path), row, folder) == ("a/b.png", ())
        for path in (f"{root}/../x.png", f"{root}s/x.png", tmp_path / "x.png"):
            with pytest.raises(Rejected, match="path_outside_root"):
                locate(str(path), row, folder)
    assert locate("/a/b.png", row, Path("/")) == ("a/b.png", ())
