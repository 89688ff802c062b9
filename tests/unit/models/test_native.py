"""Where patches and tokens of images at their own size are: drawn by hand, and as transformers counts them."""

import pytest
import torch

from megatron.vlm.models.vit.native import row_layout, stretched_positions

GRIDS = ((1, 4, 6), (1, 2, 2), (2, 2, 8), (1, 10, 6))
"""Frames, rows and columns of patches."""


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("side", [2, 5])
def test_stretched_positions_are_transformers(side: int, edges: bool) -> None:
    """And an image of a single row of squares, whose patches all stand at the top or bottom."""
    vision = pytest.importorskip("transformers.vision_utils")
    layout = row_layout(GRIDS, 2, None)
    places, weights = stretched_positions(*map(torch.from_numpy, (layout.cells, layout.sizes)), side, edges)
    way = (side, "bilinear", not edges, 2)
    rows, shares = vision.get_vision_interpolation_indices_and_weights(torch.tensor(GRIDS), *way)
    table = torch.randn(side**2, 3, generator=torch.Generator().manual_seed(side))
    expected = (table[rows] * shares[..., None]).sum(1)
    found = (table[places] * weights[..., None]).sum(1)
    assert torch.allclose(found, expected, atol=1e-6)
    corner = layout.cells.max(axis=1).tolist().index(0)
    assert (places[corner, 0], weights[corner, 0]) == (0, 1.0) or edges
