"""One line to one sample: limits hold to the token, and system messages come from where they should."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.demo.data import train_tokenizer
from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.sample import expand_runs
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.line_media import locate
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import SampleMaker
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.modalities.modality import VISION
from tests.demo import byte_level, demo_recipe, preprocessed, turns, written


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer())
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(tmp_path / "two_tiles.png")
    for tiles in (1, 3, 4):
        Image.fromarray(np.zeros((32, 32 * tiles, 3), np.uint8)).save(tmp_path / f"{tiles}.png")
    return tmp_path


def maker(root: Path, **changed: Any) -> SampleMaker:
    return SampleMaker(demo_recipe(root, max_tiles=4, **changed))


def made(root: Path, record: dict[str, Any], **changed: Any) -> Any:
    return maker(root, **changed).make(Row(1, record))


def short(images: int, question: str = "Read", system: str | None = None) -> dict[str, Any]:
    said = [{"from": "system", "value": system}] * (system is not None) + turns("<image>" * images + question, "a5")
    return {"image": ["two_tiles.png"] * images, "conversations": said}


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
    record = {field: values * turns for field, values in short(images).items()}
    with pytest.raises(Rejected, match=reason) if reason else nullcontext():
        assert made(root, record, **PALIGEMMA).units(VISION) == images
    with pytest.raises(Rejected, match="bad_roles"):
        made(root, short(images=1, system="Be brief."), **PALIGEMMA)


@pytest.mark.parametrize("changed", [{"template": "vicuna"}, {"tiling": Tiling(32, rule="fixed")}], ids=str)
def test_a_pair_and_a_model_that_asks_where_answers_begin_go_together(root: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="leave both out, or give the model's own") as error:
        maker(root, **{**PALIGEMMA, **changed})
    assert "\n" not in str(error.value)


def test_the_token_limit_counts_image_tokens_and_is_exact(root: Path) -> None:
    length = made(root, short(images=2)).length
    assert made(root, short(images=2), max_tokens=length).length == length
    with pytest.raises(Rejected, match=f"too_many_tokens: {length} tokens, limit {length - 1}"):
        made(root, short(images=2), max_tokens=length - 1)


def long(answers: int) -> dict[str, Any]:
    words = [text for number in range(answers) for text in (f"<image>Read {number}", f"a{number}")]
    images = [("two_tiles.png", "1.png")[number % 2] for number in range(answers)]
    return {"image": images, "conversations": turns(*words)}


@pytest.mark.parametrize(("rule", "most"), [("internvl", 8), ("internvl_each", 4)])
def test_a_longer_sample_gets_as_few_tiles_fewer_as_needed(root: Path, rule: str, most: int) -> None:
    wide = short(images=2) | {"image": ["4.png", "3.png"]}
    tiling = Tiling(32, max_tiles=most, rule=rule)
    whole = made(root, wide, tiling=tiling)
    assert whole.units(VISION) == 5 + 4
    for tokens, grids in ((1, [(3, 1), (3, 1)]), (4, [(3, 1), (3, 1)]), (5, [(2, 1), (2, 1)]), (13, [(1, 1), (1, 1)])):
        limit = {"max_tokens": whole.length - tokens, "shorten": ("fewer-tiles",)}
        less = made(root, wide, tiling=tiling, **limit)
        assert [(image.columns, image.rows) for image in less.items[VISION]] == grids


def test_tiles_that_images_share_are_fewer_for_all(root: Path) -> None:
    tiling = Tiling(32, max_tiles=6)
    whole = made(root, short(images=2), tiling=tiling)
    assert whole.units(VISION) == 6
    assert whole.shortened is None
    less = made(root, short(images=2), tiling=tiling, max_tokens=whole.length - 1, shorten=("fewer-tiles",))
    assert (less.units(VISION), less.shortened) == (2, "fewer-tiles")  # one each, of which there is no thumbnail
    assert less.length == whole.length - 4 * 4
    assert less.tokens.tolist() == whole.tokens.tolist()
    least = {"tiling": Tiling(32, min_tiles=2, max_tiles=6), "max_tokens": whole.length - 1}
    with pytest.raises(Rejected, match=f"too_many_tokens: {whole.length} tokens"):
        made(root, short(images=2), shorten=("fewer-tiles",), **least)


def test_a_longer_sample_ends_with_its_last_answer_that_fits(root: Path) -> None:
    """As if the rest had never been said: the same tokens, loss mask and images, cut as they were."""
    tiling = Tiling(32, max_tiles=2 * 4)  # two tiles an image, of four or of one: the share may not grow
    lengths = [made(root, long(answers), tiling=tiling).length for answers in (1, 2, 3, 4)]
    for kept in (1, 2, 3):
        for limit in (lengths[kept - 1], lengths[kept] - 1):
            cut = made(root, long(4), tiling=tiling, max_tokens=limit, shorten=("truncate",))
            same = made(root, long(kept), tiling=tiling)
            assert cut.shortened == "truncate"
            assert cut.tokens.tolist() == same.tokens.tolist()
            assert cut.loss_mask.tolist() == same.loss_mask.tolist()
            assert cut.items == same.items
            assert cut.length == same.length <= limit
    untaught = long(3)  # but for its last answer
    for number in (1, 3):
        untaught["conversations"][number]["loss"] = False
    for record, limit in ((long(4), lengths[0] - 1), (untaught, made(root, untaught, tiling=tiling).length - 1)):
        with pytest.raises(Rejected, match="too_many_tokens"):
            made(root, record, tiling=tiling, max_tokens=limit, shorten=("truncate",))


def test_ways_are_tried_in_the_order_given_and_counted(root: Path) -> None:
    tiling = Tiling(32, max_tiles=8)
    limit = made(root, long(2), tiling=tiling).length - 1
    flags: dict[str, Any] = {"tiling": tiling, "max_tokens": limit}
    for first, second in (("fewer-tiles", "truncate"), ("truncate", "fewer-tiles")):
        assert made(root, long(2), shorten=(first, second), **flags).shortened == first
    lines = written(root / "chat.jsonl", long(2), long(1), long(4), long(2))
    data = preprocessed(root, lines, root / "short", shorten=("fewer-tiles", "truncate"), **flags)
    assert data.manifest["shortened"] == {"fewer-tiles": 2, "truncate": 1}
    assert data.manifest["samples"] == 4
    lengths_found = [len(data.sample(sample).text[0]) for sample in range(4)]
    assert data.sizes.tokens.tolist() == lengths_found
    assert max(lengths_found) <= limit
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
    found = made(root, short(0, question="a5", system=own), template=template, system_message=flag)
    same = made(root, short(0, question="a5", system=expected), template=template, system_message="")
    assert found.tokens.tolist() == same.tokens.tolist()


def test_a_hugging_face_tokenizer_serves_several_workers(root: Path) -> None:
    pytest.importorskip("tokenizers")
    byte_level(["Read a5"]).save(str(root / "tokenizer.json"))
    lines = written(root / "chat.jsonl", *[short(1), short(2)] * 20)
    recipe = Recipe(root, root / "tokenizer.json", "llama3", Tiling(32), 4)
    one = preprocess(open_job([lines], recipe, root / "one", lines_per_part=5))
    two = preprocess(open_job([lines], recipe, root / "two", lines_per_part=5), workers=2)
    assert one == two
    assert one["samples"] == 40
    assert (root / "one" / "tokens.bin").read_bytes() == (root / "two" / "tokens.bin").read_bytes()


def test_a_template_without_a_system_turn_refuses_one(root: Path) -> None:
    with pytest.raises(Rejected, match="bad_roles: chat template 'mistral' has no system turn"):
        made(root, short(0, system="Read"), template="mistral")
    with pytest.raises(UserError, match="'mistral' has no system turn; leave --system-message out"):
        maker(root, template="mistral", system_message="Read")


def test_a_strip_that_cannot_become_a_square_is_rejected(root: Path) -> None:
    Image.new("1", (40_000, 2)).save(root / "two_tiles.png")
    for rule in ("pad", "crop"):
        with pytest.raises(Rejected, match="too_many_pixels"):
            made(root, short(1), tiling=Tiling(336, rule=rule))


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
