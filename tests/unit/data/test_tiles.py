"""Tiling: the grids of the published rules, tiles that hold the pixels they should, and joined tiles of LLaVA-1.6 and
LLaVA-OneVision: the tokens of an image are those of transformers, in its order.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.media.tiles import Tiling, tile_image
from omnibal_ext.errors import UserError
from omnibal_ext.families.internvl.tiling import internvl_grid
from omnibal_ext.families.llava.tiling import image_sources
from omnibal_ext.families.media import TILINGS
from omnibal_ext.modalities.vision.features import NEWLINE
from omnibal_ext.modalities.vision.tiling import TiledImage
from omnibal_ext.packing.options import PackOptions
from tests.demo import demo_dataset, demo_packs
from tests.media import seen

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3))
@example(800, 1300, 1)  # .615: 3/5 is nearer than 2/3 but has 15 tiles
@example(500, 500, 1)  # all squares tie; 2 x 2 would need more than half of its pixels
@example(640, 640, 1)  # 409,600 > half of 802,816
@example(10_000, 10, 1)
@example(1, 10_000, 1)
def test_grids_are_those_that_hugging_face_chooses(width: int, height: int, least: int) -> None:
    got_ocr2 = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    theirs = got_ocr2.get_optimal_tiled_canvas((height, width), (448, 448), least, 12)
    assert internvl_grid(width, height, tile_size=448, min_tiles=least, max_tiles=12) == theirs
    processing = pytest.importorskip("transformers.image_processing_utils")
    rows, columns = processing.select_best_resolution((height, width), PINPOINTS)
    assert TILINGS["anyres"].grid(width, height, 336, 1, 4) == (columns // 336, rows // 336)


@pytest.mark.parametrize("images", [2, 5, 12])
def test_an_image_among_others_has_its_own_grid_in_llava_next(images: int) -> None:
    """As transformers' processor and model have it, which look at sizes alone."""
    tiling = Tiling(tile_size=16, max_tiles=12, rule="anyres")
    assert tile_image("x.png", (40, 40), images, tiling) == tile_image("x.png", (40, 40), 1, tiling)
    assert tile_image("x.png", (40, 40), images, tiling).tiles == 5


@pytest.mark.parametrize("wrong", [{"rule": "spiral"}, {"min_tiles": 0}, {"min_tiles": 5, "max_tiles": 4}])
def test_an_impossible_tiling_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Tiling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("images", [1, 2, 3, 4, 12, 13, 40])
def test_an_image_among_others_has_its_share_of_tiles_and_one_at_least(images: int) -> None:
    """Of a wide picture: as many tiles in a row as its share allows."""
    share = max(1, 12 // images)
    found = tile_image("a.png", (12 * 448, 448), images, Tiling(max_tiles=12))
    assert (found.columns, found.rows) == (share, 1)
    assert found.tiles == share + (share > 1), "a single tile has no thumbnail"
    assert tile_image("a.png", (12 * 448, 448), images, Tiling(max_tiles=12, thumbnail=False)).tiles == share
    least = tile_image("a.png", (448, 448), images, Tiling(min_tiles=4, max_tiles=12))
    assert least.columns * least.rows == min(4, share), "no more than its share"


def test_rules_replace_each_other_where_a_model_reads_their_tiles_alike() -> None:
    alike = [{"internvl", "internvl_each", "pad", "crop", "fixed", "letterbox"}]
    alike.append({"native", "native_grown", "native_widened"})
    alone = [{rule} for rule in TILINGS if not any(rule in group for group in alike)]
    for group in (*alike, *alone):
        read_as = {TILINGS[rule].read_as for rule in group}
        assert group == {name for name, rule in TILINGS.items() if rule.read_as in read_as}


@pytest.mark.parametrize(("least", "most"), [(147384, 2822400), (384**2, 1536**2), (576 * 14**2, 5120 * 14**2)])
def test_images_of_paddleocr_vl_are_as_large_as_its_processors(least: int, most: int) -> None:
    """Also where limits are no whole patches, and for slips, which are widened first."""
    module = pytest.importorskip("transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl")
    rule, seen = TILINGS["native_widened"], set()
    for width, height in np.random.default_rng(0).integers(1, [600, 500], (3000, 2)).tolist():
        if max(width, height) > 40 * min(width, height):
            continue
        for scale in (1, 7):
            size = width * scale, height * scale
            rows, columns = (side // 14 for side in module.smart_resize(*size[::-1], 28, least, most))
            found = rule.grid(*size, 14, least // 14**2, most // 14**2)
            assert found == (columns, rows), size
            seen.add(found)
    assert len(seen) > 100


@settings(max_examples=200)
@given(st.integers(1, 2000), st.integers(1, 2000), st.sampled_from([2, 3, 24]))
def test_the_order_is_that_of_transformers(width: int, height: int, side: int) -> None:
    modeling = pytest.importorskip("transformers.models.llava_next.modeling_llava_next")
    grid = TILINGS["anyres"].grid(width, height, 336, 1, 12)
    tiles = 1 + grid[0] * grid[1]
    numbered = torch.arange(tiles * side * side, dtype=torch.float64).view(tiles, side * side, 1)
    vision = SimpleNamespace(image_size=336, patch_size=336 // side if side != 24 else 14)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_grid_pinpoints=PINPOINTS))
    (packed,), (length,) = modeling.LlavaNextModel.pack_image_features(
        model, [numbered], [(height, width)], "default", torch.tensor([float(NEWLINE)], dtype=torch.float64)
    )
    mine = image_sources((width, height), grid, side)
    assert len(mine) == length
    assert mine.tolist() == packed[:, 0].long().tolist()


@settings(max_examples=200)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([2, 3, 27]), st.booleans())
@example(2304, 2304, 27, False)  # the largest
@example(1300, 700, 27, False)
@example(1920, 768, 27, False)  # ten tiles: a little over nine is tolerated
def test_tokens_are_those_of_llava_onevision(width: int, height: int, side: int, among_others: bool) -> None:
    """Random features, many of them made fewer; an image among others is one tile."""
    modeling = pytest.importorskip("transformers.models.llava_onevision.modeling_llava_onevision")
    image = tile_image("", (width, height), 1 + among_others, Tiling(384, 1, 36, rule="anyres_max_9"))
    features = torch.randn(image.tiles, side * side, 3, generator=torch.Generator().manual_seed(width))
    newline = torch.tensor([7.0, 8.0, 9.0])
    vision = SimpleNamespace(image_size=384, patch_size=384 // side)
    pinpoints = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints))
    (packed,), (length,) = modeling.LlavaOnevisionModel.pack_image_features(
        model, [features], [(height, width)], newline
    )
    order = TILINGS["anyres_max_9"].order(image, side * side)
    assert len(order) == length
    sources, weights = order.as_means()
    known = torch.cat([features.flatten(0, 1), newline[None]])
    mine = (known[torch.from_numpy(sources)] * torch.from_numpy(weights)[..., None]).sum(1)
    assert torch.allclose(mine, packed, atol=1e-4)  # seen: 3e-7; places on a long side, rounded twice, make 4e-5


def test_what_cannot_be_joined_is_refused() -> None:
    image = tile_image("x.png", (100, 50), 1, Tiling(16, rule="anyres"))
    with pytest.raises(UserError, match="are no square"):
        TILINGS["anyres"].order(image, 6)
    with pytest.raises(UserError, match="preprocess again"):
        TILINGS["anyres"].order(TiledImage("x.png", 2, 1, True), 4)
    with pytest.raises(UserError, match="has a thumbnail always"):
        Tiling(rule="anyres", thumbnail=False)


def test_a_pack_of_joined_images_reaches_the_model_in_order(tmp_path: Path) -> None:
    """From chat lines to a microbatch: a source for every image token, numbered on through the pack's tiles."""
    tiling = Tiling(32, max_tiles=8, rule="anyres")
    data = demo_dataset(tmp_path, tmp_path / "dataset", 12, tiling=tiling)
    index = demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=60, llm_budget=600))
    batch = PackDataset(data, index, Needs(frozenset({"tiles"}), tokens=True, labels=False))[0]
    assert len(seen(batch).sources) == len(seen(batch).positions)
    expected, tiles = [], 0
    for image in (image for sample in index.samples(0) for image in data.sample(sample).images):
        own = image_sources((image.width, image.height), (image.columns, image.rows), side=2)
        expected += [NEWLINE if source == NEWLINE else source + 4 * tiles for source in own.tolist()]
        tiles += image.tiles
    assert seen(batch).sources.tolist() == expected
    assert tiles == len(seen(batch).values) == seen(batch).amount
