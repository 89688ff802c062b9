"""Where patches and tokens of images at their own size are: drawn by hand, and as transformers counts them."""

import numpy as np
import pytest
import torch

from megatron.vlm.models.vit.native import (
    axis_frequencies,
    bicubic_positions,
    row_layout,
    stretched_positions,
    text_and_image_positions,
)
from omnibal_ext.architectures.vision import NativeResolution

GRIDS = ((1, 4, 6), (1, 2, 2), (2, 2, 8), (1, 10, 6))
"""Frames, rows and columns of patches."""


@pytest.mark.parametrize("window", [1, 2, 3])
def test_layout_is_transformers(window: int) -> None:
    vision = pytest.importorskip("transformers.vision_utils")
    grids, layout = torch.tensor(GRIDS), row_layout(GRIDS, 2, window)
    order, bounds = vision.get_vision_window_index(grids, 2, window * 2 * 14, 14)
    assert layout.order.tolist() == order.tolist()
    assert np.cumsum([0, *layout.windows]).tolist() == torch.unique_consecutive(torch.as_tensor(bounds)).tolist()
    places = vision.get_vision_position_ids(grids, 2).reshape(-1, 4, 2)[order].reshape(-1, 2)
    assert layout.places.tolist() == places.tolist()


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("side", [2, 5])
def test_stretched_positions_are_transformers(side: int, edges: bool) -> None:
    """And an image of a single row of squares, whose patches all stand at the top or bottom."""
    vision = pytest.importorskip("transformers.vision_utils")
    layout = row_layout(GRIDS, 2, None)
    places, weights = stretched_positions(layout.places, layout.sizes, side, edges)
    way = (side, "bilinear", not edges, 2)
    rows, shares = vision.get_vision_interpolation_indices_and_weights(torch.tensor(GRIDS), *way)
    table = torch.randn(side**2, 3, generator=torch.Generator().manual_seed(side))
    expected = (table[rows] * shares[..., None]).sum(1)
    found = (table[torch.from_numpy(places)] * torch.from_numpy(weights)[..., None]).sum(1)
    assert torch.allclose(found, expected, atol=1e-6)
    corner = layout.places.max(axis=1).tolist().index(0)
    assert (places[corner, 0], weights[corner, 0]) == (0, 1.0) or edges


@pytest.mark.parametrize("side", [2, 5])
def test_bicubic_positions_are_torchs(side: int) -> None:
    """As GLM-4.1V stretches a square of them over an image: its own sampling, of images of any shape."""
    layout = row_layout(GRIDS, 2, None)
    places, weights = bicubic_positions(layout.places, layout.sizes, side)
    table = torch.randn(side**2, 3, generator=torch.Generator().manual_seed(side))
    found = (table[torch.from_numpy(places)] * torch.from_numpy(weights)[..., None]).sum(1)
    at = (torch.from_numpy(layout.places).float() + 0.5) / torch.from_numpy(layout.sizes) * 2 - 1
    square = table.view(1, side, side, 3).permute(0, 3, 1, 2)
    options = {"mode": "bicubic", "align_corners": False, "padding_mode": "border"}
    wanted = torch.nn.functional.grid_sample(square, at.flip(1)[None, :, None], **options)[0, :, :, 0].T
    assert torch.allclose(found, wanted, atol=2e-6)


def test_columns_turn_by_frequencies_between_those_of_rows() -> None:
    """Pixtral's; those of a head 16 wide, of which eight numbers turn with rows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.PixtralVisionConfig(hidden_size=32, num_attention_heads=2)
    modeling = transformers.models.pixtral.modeling_pixtral
    theirs = modeling.PixtralVisionRotaryEmbedding(config).inv_freq.view(2, 4)
    found = axis_frequencies(NativeResolution(columns_between=True), 8)
    assert torch.allclose(found, theirs, rtol=1e-6)
    assert found[1, 0] < found[0, 0]
    alike = axis_frequencies(NativeResolution(), 8)
    assert torch.equal(alike[0], alike[1])


FILMS = {"qwen2_vl": (None, "Qwen2VL"), "qwen2_5_vl": (3, "Qwen2_5_VL")}


@pytest.mark.parametrize("kind", FILMS)
def test_time_of_videos_is_transformers(kind: str) -> None:
    """A word, a long video, a word, an image, two words, a short video; and a sample that begins with a video."""
    transformers = pytest.importorskip("transformers")
    in_time, name = FILMS[kind]
    grids, seconds, films = [(9, 4, 2), (1, 2, 4), (2, 2, 2), (3, 2, 2)], [0.7, 1.0, 1.9, 0.29], [2, 1, 2, 2]
    words, starts, lengths = [(1, 0), (1, 0), (2, 3), (0, 2)], [], [0, 0]
    ids: list[list[int]] = [[], []]
    for number, ((before, after), (steps, rows, columns), token) in enumerate(zip(words, grids, films, strict=True)):
        sample = ids[number // 3]
        sample += [0] * before
        starts.append(sum(map(len, ids[: number // 3])) + len(sample))
        sample += [token] * (steps * rows * columns // 4) + [0] * after
    lengths = list(map(len, ids))
    native = NativeResolution(positions_per_second=in_time)
    found = text_and_image_positions(lengths, grids, starts, native, seconds)
    vision = {"spatial_merge_size": 2, **({} if in_time is None else {"tokens_per_second": in_time})}
    module = getattr(transformers.models, kind)
    model = getattr(getattr(module, f"modeling_{kind}"), f"{name}Model")
    config = getattr(transformers, f"{name}Config")(vision_config=vision)
    stand_in = type("Stand", (), {"config": config, "get_vision_position_ids": model.get_vision_position_ids})()
    for number, (sample, expected) in enumerate(zip(ids, np.split(found, [lengths[0]], axis=1), strict=True)):
        mine = [index for index in range(4) if index // 3 == number]
        shown = {2: [], 1: []}
        for index in mine:
            shown[films[index]].append(index)
        times = {"second_per_grid_ts": torch.tensor([seconds[index] for index in shown[2]])} if in_time else {}
        theirs, _ = model.get_rope_index(
            stand_in, torch.tensor([sample]), torch.tensor([sample]),
            image_grid_thw=torch.tensor([grids[index] for index in shown[1]]) if shown[1] else None,
            video_grid_thw=torch.tensor([grids[index] for index in shown[2]]), **times,
        )  # fmt: skip
        assert expected.tolist() == theirs[:, 0].tolist()
