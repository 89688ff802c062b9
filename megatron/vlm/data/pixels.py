"""From bytes to what a ViT reads: on any device, without waiting for it."""

from functools import cache

import torch
from torch import Tensor

from megatron.vlm.microbatch import PixelStatistics


def normalise(tiles: Tensor, statistics: PixelStatistics) -> Tensor:
    """uint8 [tiles, size, size, 3] to float32 [tiles, 3, size, size] of mean 0 and deviation 1 over a data set."""
    pixels = tiles.permute(0, 3, 1, 2).to(torch.float32) / 255
    mean, deviation = _on_device(statistics, tiles.device)
    return ((pixels - mean) / deviation).contiguous()


@cache
def _on_device(statistics: PixelStatistics, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation, each [3, 1, 1]; made once, as the host waits for a copy to the device."""
    mean, deviation = (torch.tensor(values, device=device).view(3, 1, 1) for values in statistics)
    return mean, deviation
