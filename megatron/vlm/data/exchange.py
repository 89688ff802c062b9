"""Rows of samples on their way to the ranks that run them next, and their gradients on the way back.

    rank 0   a a c c c        places before  a 0, b 1, c 0, d 1        rank 0   b d d      after: a 1, b 0, c 1, d 0
    rank 1   b d d            rows           2    1    3    2          rank 1   a a c c c

On every rank the samples lie in the order of their numbers, before and after. Every rank knows all places, so nothing
but the rows is sent, once. (Core's own all-to-all takes rows on the device only; pixels and words are on the host.)
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnibal_ext.arrays import Ints


class Route:
    """What a rank gives to every other one and takes from it, for samples that change their places."""

    def __init__(self, source: Ints, target: Ints, rows: Ints, rank: int, ranks: int) -> None:
        """Places of each sample before and after, and its rows, [N] each."""
        own, here = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
        by_target = np.argsort(target[own], kind="stable")
        by_source = np.argsort(source[here], kind="stable")
        self.send_order = _rows_of(by_target, rows[own])
        self.receive_order = _rows_of(by_source, rows[here])
        self.send_counts = np.bincount(target[own], rows[own], ranks).astype(int).tolist()
        self.receive_counts = np.bincount(source[here], rows[here], ranks).astype(int).tolist()

    def send(self, rows: Tensor, group: Any = None) -> Tensor:
        """The rows of the samples that are here afterwards, for those that were here before: [rows, ...] both."""
        return _exchanged(rows, self.send_order, self.receive_order, self.send_counts, self.receive_counts, group)

    def send_back(self, rows: Tensor, group: Any = None) -> Tensor:
        """The other way round."""
        return _exchanged(rows, self.receive_order, self.send_order, self.receive_counts, self.send_counts, group)


def exchange(rows: Tensor, route: Route, group: Any = None) -> Tensor:
    """Rows [n, ...] of the samples here to where they go, for autograd: gradients come back the same way.

    All ranks must call it, and its backward: those without a sample give rows [0, ...] that require a gradient.
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


def _exchanged(rows: Tensor, order: Tensor, arrived: Tensor, gives: list[int], takes: list[int], group: Any) -> Tensor:
    sent = rows.index_select(0, order.to(rows.device))
    taken = rows.new_empty((sum(takes), *rows.shape[1:]))
    torch.distributed.all_to_all_single(taken, sent, takes, gives, group)
    return torch.empty_like(taken).index_copy_(0, arrived.to(rows.device), taken)


def _rows_of(order: Ints, rows: Ints) -> Tensor:
    """Numbers of the rows of samples in some order, where they lie end to end: int64 [sum of rows]."""
    starts = np.cumsum(rows) - rows
    return torch.from_numpy(np.repeat(starts[order] - (np.cumsum(rows[order]) - rows[order]), rows[order])
                            + np.arange(int(rows.sum())))  # fmt: skip
