"""Rotary positions as attention applies them: query and key are rotated by the angles of their rows.

Core rotates them in front of the attention, and takes cosines and sines of the angles anew for each, in every layer:
some twenty kernels, unless Transformer Engine has one. Here they are taken once a pack, and one kernel rotates both.
"""

from typing import NamedTuple

import torch
from megatron.core.jit import jit_fuser
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines that rotate the queries and keys of a pack."""

    cosines: Tensor
    """Cosine of each row's angle at each number of a head that is rotated, [rows, 1, 1, numbers]; or, where parts of a
    head are rotated separately, [rows, 1, 1, parts, numbers]."""
    sines: Tensor
    query_factors: Tensor | None = None
    """Factors of rotated queries, [rows, 1, 1, 1]; None: 1."""


def rotation(angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotation:
    """Make the rotation by these angles (fp32), in `dtype`; `factor` scales cosines and sines (YaRN)."""
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


@jit_fuser
def turned(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, query_factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate query [rows, 1, heads, width] and key [rows, 1, groups, width]; if there are fewer angles than numbers in
    a head, the numbers behind stay as they are."""
    query = _turned(query, cosines, sines)
    return query if query_factors is None else query * query_factors, _turned(key, cosines, sines)


def _turned(rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    if cosines.dim() > rows.dim():
        return _turned(rows.unflatten(-1, cosines.shape[-2:]), cosines, sines).flatten(-2)
    if (width := cosines.shape[-1]) == rows.shape[-1]:
        return rows * cosines + _a_quarter_on(rows) * sines
    turning, others = rows[..., :width], rows[..., width:]
    return torch.cat((turning * cosines + _a_quarter_on(turning) * sines, others), dim=-1)


def _a_quarter_on(rows: Tensor) -> Tensor:
    """Rotate each pair by 90 degrees: one number of the first half, one of the second."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
