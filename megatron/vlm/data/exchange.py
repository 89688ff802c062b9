"""Send rows of samples (tiles, tokens, features) from the ranks that have them to others, and gradients back.

    rank 0   a a c c c        ranks before   a 0, b 1, c 0, d 1        rank 0   b d d      after: a 1, b 0, c 1, d 0
    rank 1   b d d            rows           2    1    3    2          rank 1   a a c c c

Every rank keeps its samples in the order of their numbers, before and after, and knows all ranks and row counts, so
that one all-to-all of the rows suffices. (megatron.core's takes device tensors only; pixels and token ids are on the
host.)
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnibal_ext.arrays import Ints


class Route:
    """The rows that a rank sends to and receives from every other one."""

    def __init__(self, source: Ints, target: Ints, rows: Ints, rank: int, ranks: int) -> None:
        """`source` and `target`: rank of each of N samples before and after; `rows`: its number of rows. [N] each."""
        own, here = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
        by_target = np.argsort(target[own], kind="stable")
        by_source = np.argsort(source[here], kind="stable")
        self.send_order = _rows_of(by_target, rows[own])
        self.receive_order = _rows_of(by_source, rows[here])
        self.send_counts = np.bincount(target[own], rows[own], ranks).astype(int).tolist()
        self.receive_counts = np.bincount(source[here], rows[here], ranks).astype(int).tolist()

    def send(self, rows: Tensor, group: Any = None) -> Tensor:
        """Rows [n, ...] of the samples of this rank before -> rows [m, ...] of its samples after. Collective."""
        return _all_to_all(rows, self.send_order, self.receive_order, self.send_counts, self.receive_counts, group)

    def send_back(self, rows: Tensor, group: Any = None) -> Tensor:
        """The inverse of `send`."""
        return _all_to_all(rows, self.receive_order, self.send_order, self.receive_counts, self.send_counts, group)


def exchange(rows: Tensor, route: Route, group: Any = None) -> Tensor:
    """`Route.send` for autograd: gradients return by `Route.send_back`.

    All ranks must run it and its backward; a rank without samples gives rows [0, ...] that require a gradient.
    """
    sent: Tensor = _Exchange.apply(rows, route, group)
    return sent


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, group: Any) -> Tensor:
        ctx.route, ctx.group = route, group
        return route.send(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.route.send_back(gradient, ctx.group), None, None


def _all_to_all(
    rows: Tensor, send_order: Tensor, receive_order: Tensor, sent: list[int], received: list[int], group: Any
) -> Tensor:
    ordered = rows.index_select(0, send_order.to(rows.device))
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    torch.distributed.all_to_all_single(arrived, ordered, received, sent, group)
    return torch.empty_like(arrived).index_copy_(0, receive_order.to(rows.device), arrived)


def _rows_of(order: Ints, rows: Ints) -> Tensor:
    """Indices that bring concatenated samples into `order`; sample i has rows[i] rows: int64 [sum of rows]."""
    starts = np.cumsum(rows) - rows
    return torch.from_numpy(np.repeat(starts[order] - (np.cumsum(rows[order]) - rows[order]), rows[order])
                            + np.arange(int(rows.sum())))  # fmt: skip
