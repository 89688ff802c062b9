"""Joined tiles of LLaVA-1.6 and LLaVA-OneVision: the tokens of an image are those of transformers, in its order."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.media.features import NEWLINE
from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.data.media.tiling import TiledImage
from megatron.vlm.families.llava.tiling import image_sources
from megatron.vlm.families.media import TILINGS
from omnibal_ext.errors import UserError
from omnibal_ext.packing.options import PackOptions
from tests.demo import demo_dataset, demo_packs

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


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
    batch = PackDataset(data, index, Needs(pixels=True, tokens=True, labels=False))[0]
    assert len(batch.image_sources) == len(batch.image_positions)
    expected, tiles = [], 0
    for image in (image for sample in index.samples(0) for image in data.sample(sample).images):
        own = image_sources((image.width, image.height), (image.columns, image.rows), side=2)
        expected += [NEWLINE if source == NEWLINE else source + 4 * tiles for source in own.tolist()]
        tiles += image.tiles
    assert batch.image_sources.tolist() == expected
    assert tiles == len(batch.pixels) == batch.tiles
