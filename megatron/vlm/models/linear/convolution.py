"""A causal, depthwise convolution over the tokens of a pack, within samples."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def by_shifts(rows: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Compute silu of the convolution of rows [T, width] with weight [width, kernel], whose last column is of the row
    itself -> [T, width]; `positions` [T]: of each row in its sample."""
    out = rows * weight[:, -1]
    for back in range(1, min(weight.shape[1], len(rows))):
        earlier = torch.cat([rows.new_zeros(back, rows.shape[1]), rows[:-back]])
        out = out + torch.where(positions[:, None] >= back, earlier, 0) * weight[:, -1 - back]
    return silu(out)


def by_kernel(rows: Tensor, weight: Tensor, boundaries: Tensor, indices: Tensor) -> Tensor:
    """Compute `by_shifts` by flash-linear-attention; `boundaries` int32 [samples + 1], `indices` of `chunk_indices`."""
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(
        x=rows.unsqueeze(0), weight=weight, bias=None, activation="silu", cu_seqlens=boundaries, chunk_indices=indices
    )
    found: Tensor = out.squeeze(0)
    return found
