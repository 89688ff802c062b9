"""Torch's variable-length attention on a CPU, for which it has no kernel: its operations, segment by segment."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def on_cpu() -> None:
    """From here on in this process."""
    operations: Any = varlen
    operations._varlen_attn.register_kernel("cpu")(_forward)
    operations._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _: Tensor, most: int, __: int, causal: bool = False,
    scale: float | None = None, window: list[int] | None = None, *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = _segments(starts, query, *_for_each_head(query, key, value))
    found = [attention(*part, 0.0, _is_causal(causal, window), scale=scale) for part in parts]
    out, sums = (torch.cat(column, dim=2) for column in zip(*(pair[:2] for pair in found), strict=True))
    return _rows(out), sums[0].contiguous(), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts: Tensor, _: Tensor,
    most: int, __: int, causal: bool, state: Tensor, scale: float | None = None, window: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = _segments(starts, grad, query, *_for_each_head(query, key, value), out)
    each = zip(parts, sums.unsqueeze(0).split(starts.diff().tolist(), dim=2), strict=True)
    found = [attention_backward(*part, one, 0.0, _is_causal(causal, window), scale=scale) for part, one in each]
    grads = [_rows(torch.cat(column, dim=2)) for column in zip(*found, strict=True)]
    of_key, of_value = (one.unflatten(1, (key.shape[1], -1)).sum(2) for one in grads[1:])
    return grads[0], of_key, of_value


def _is_causal(causal: bool, window: list[int] | None) -> bool:
    return causal or (window is not None and window[1] == 0)


def _for_each_head(query: Tensor, *groups: Tensor) -> Iterator[Tensor]:
    return (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in groups)


def _segments(starts: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """[T, heads, width] -> [1, heads, rows of a segment, width]."""
    lengths = starts.diff().tolist()
    return zip(*(one.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for one in tensors), strict=True)


def _rows(heads: Tensor) -> Tensor:
    return heads.squeeze(0).transpose(0, 1).contiguous()
