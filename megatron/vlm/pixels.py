"""uint8 pixels to the normalised ones that a ViT reads, on any device, without synchronising."""

from functools import cache

import torch
from torch import Tensor

from megatron.vlm.platform import to_device

PixelStatistics = tuple[tuple[float, ...], tuple[float, ...]]
"""(mean, standard deviation) of each colour channel, in units of 0 to 1, with which a ViT was trained."""


def normalise(tiles: Tensor, statistics: PixelStatistics) -> Tensor:
    """Normalise uint8 [tiles, size, size, 3] to float32 [tiles, 3, size, size]: (x / 255 - mean) / deviation.

    With frames: [tiles, frames, size, size, 3] -> [tiles, 3, frames, size, size].
    """
    pixels = tiles.movedim(-1, 1).to(torch.float32) / 255
    mean, deviation = (each.view(3, *[1] * (tiles.dim() - 2)) for each in _on_device(statistics, tiles.device))
    return ((pixels - mean) / deviation).contiguous()


@cache
def _on_device(statistics: PixelStatistics, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation, [3] each, on a device; copied there once."""
    mean, deviation = (torch.tensor(values) for values in statistics)
    return (mean, deviation) if device == mean.device else (to_device(mean), to_device(deviation))
