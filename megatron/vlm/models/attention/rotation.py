"""Rotary positions as attention applies them: query and key turn by the angles of their rows.

Core turns them in front of the attention, and takes cosines and sines of the angles anew for each, in every layer: some
twenty kernels, unless Transformer Engine has one. Here they are taken once a pack, and a layer turns both in one.
"""

from typing import NamedTuple

import torch
from megatron.core.jit import jit_fuser
from torch import Tensor


class Rotation(NamedTuple):
    """How queries and keys turn."""

    cosines: Tensor
    """Of the angle of every row and number of a head that turns, [rows, 1, 1, numbers]; or of each part of a head that
    turns by itself, [rows, 1, 1, parts, numbers]."""
    sines: Tensor
    query_factors: Tensor | None = None
    """[rows, 1, 1, 1] What rotated queries are multiplied with; None: 1."""


def rotation(angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotation:
    """By these angles, fp32, in the precision of what is turned; `factor` is what YaRN multiplies with."""
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


@jit_fuser
def turned(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, query_factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Query [rows, 1, heads, width] and key [rows, 1, groups, width], each pair of numbers turned by its angle; where
    there are fewer angles than numbers, the others stay as they are."""
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
    """A pair is a number of the first half of those that turn and one of the second."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
