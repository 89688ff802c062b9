"""Dispatch of rows to experts, and the way back.

    rows ── copies, sorted by expert ──> [all-to-all, sorted again] ──> experts ──> [all-to-all] ── sums ──> rows

Each row has one copy for each expert chosen for it. Without expert parallelism all sizes but the experts' are known
beforehand, and these stay on the device: the host never waits. With expert parallelism (in brackets) the host must know
how many copies go to each rank. Copies are summed row by row, not by atomic additions: their order, and with it the
result, is the same each time.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megatron.vlm import platform


@dataclass(frozen=True)
class Order:
    """Which row each copy is of (a row has a copy for each expert chosen for it), and where each row's copies are."""

    row: Tensor
    """[copies], index of the row that each copy is of."""
    position: Tensor
    """[rows, copies of each], index of each copy."""

    @classmethod
    def of(cls, row: Tensor, each: int) -> "Order":
        """Return the order in which copy i is of `row[i]`, with `each` copies of every row."""
        return cls(row, row.argsort(stable=True).view(-1, each))

    def copies(self, rows: Tensor) -> Tensor:
        """Copy rows [rows, ...] to [copies, ...]."""
        out: Tensor = _Copies.apply(rows, self.row, self.position)
        return out

    def sums(self, copies: Tensor) -> Tensor:
        """Sum the copies of each row, [copies, ...] -> [rows, ...]."""
        out: Tensor = _Sums.apply(copies, self.row, self.position)
        return out


def by_expert(chosen: Tensor, each: int) -> tuple[Order, Tensor]:
    """Sort copies by expert, then by row; `chosen` bool [rows, experts] has `each` true in every row. Also returns each
    copy's index in the flattened `chosen`."""
    rows, experts = chosen.shape
    first = chosen.t().reshape(-1).argsort(descending=True, stable=True)[: rows * each]
    row = first % rows
    return Order.of(row, each), row * experts + first // rows


class Travel:
    """An all-to-all of copies, sorted by expert, to the expert-parallel ranks that have their experts, and back."""

    def __init__(self, counts: Tensor, group: torch.distributed.ProcessGroup) -> None:
        """Exchange how many copies go to each expert; `counts` [experts of all ranks]: from this rank. Collective."""
        sent = counts.view(group.size(), -1)
        self.group, self.received = group, torch.empty_like(sent)
        torch.distributed.all_to_all_single(self.received, sent, group=group)
        self._sizes = platform.Reading(torch.stack([sent.sum(1), self.received.sum(1)]))

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Copies sent to each rank, and received from each. The host waits here."""
        return self._sizes.numbers()

    @cached_property
    def order(self) -> Order:
        """Order of the received copies: they come by rank, then expert, and are sorted by expert."""
        ranks, experts = self.received.shape
        numbers = torch.arange(experts, device=self.received.device).repeat(ranks)
        expert = numbers.repeat_interleave(self.received.flatten(), output_size=sum(self.sizes[1]))
        return Order.of(expert.argsort(stable=True), 1)

    @property
    def counts(self) -> Tensor:
        """[experts here], copies received by each."""
        return self.received.sum(0)

    def there(self, copies: Tensor) -> Tensor:
        """Send [copies of this rank, ...] to their experts; return [copies for its experts, ...], by expert."""
        sent, received = self.sizes
        return self.order.copies(all_to_all(self.group, copies, received, sent))

    def back(self, copies: Tensor) -> Tensor:
        """Send outputs back to the copies' ranks: [copies for its experts, ...] -> [copies of this rank, ...]."""
        sent, received = self.sizes
        out: Tensor = all_to_all(self.group, self.order.sums(copies), sent, received)
        return out


class _Copies(torch.autograd.Function):
    """Copies of rows, whose gradients are summed by row: the backward pass of `_Sums`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return rows.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, *ctx.saved_tensors), None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, row: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        out: Tensor = _summed(copies, position)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


@jit_fuser
def _summed(copies: Tensor, position: Tensor) -> Tensor:
    return copies[position].sum(1)
