"""Exchanges within the team of ranks that runs a wide pack (Ulysses, arXiv 2309.14509, but only of split samples).

    heads      some rows of a split sample, all heads      ->  all rows of the sample, some heads      and back
    features   on the rank that encoded the image          ->  on the rank that holds its tokens

Only split samples are exchanged, and each feature is sent once. Both are one all-to-all with uneven splits, which every
rank knows from the pack. The backward pass sends gradients the other way, in the same order on all ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.vlm import platform
from megatron.vlm.microbatch import HeadExchange, PackShard
from omnibal_ext.modalities.work import HeadShares


class Watched:
    """A hook for measurements: `by(backward)` is a context entered around each exchange."""

    def __init__(self) -> None:
        self.by: Callable[[bool], AbstractContextManager[Any]] = nullcontext


watched = Watched()


def rows_to_heads(query: Tensor, key: Tensor, value: Tensor, exchange: HeadExchange) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's rows of the split samples for all their rows, sample by sample, of the heads computed here.

    [n, heads, d] and twice [n, groups, d] -> [N, heads here, d] and twice [N, groups or heads here, d].
    """
    shares, here = HeadShares(query.shape[1], key.shape[1], len(exchange.rows)), exchange.team_rank
    spans = zip(shares.heads, shares.groups, strict=True)
    sent = [torch.cat([query[:, a:b], key[:, c:d], value[:, c:d]], dim=1) for (a, b), (c, d) in spans]
    heads, groups = shares.widths(here)
    found, keys, values = _meet(sent, heads + 2 * groups, exchange).split([heads, groups, groups], dim=1)
    if (columns := shares.by_head(here)) is not None:
        index = platform.to_device(torch.tensor(columns))
        keys, values = keys.index_select(1, index), values.index_select(1, index)
    return found.contiguous(), keys.contiguous(), values.contiguous()


def rows_to_groups(rows: Tensor, exchange: HeadExchange) -> tuple[Tensor, tuple[int, int]]:
    """Exchange rows [n, groups, d] for all rows of some groups: [N, groups here, d], and (first, end) of the groups."""
    shares = HeadShares(rows.shape[1], rows.shape[1], len(exchange.rows))
    first, end = shares.heads[exchange.team_rank]
    return _meet([rows[:, a:b] for a, b in shares.heads], end - first, exchange), (first, end)


def heads_to_rows(out: Tensor, heads: int, exchange: HeadExchange) -> Tensor:
    """Exchange back what `rows_to_heads` did: [N, heads here, d] -> this rank's rows of all heads, [n, heads, d]."""
    shares = HeadShares(heads, heads, len(exchange.rows))
    by_position = out[platform.to_device(torch.argsort(exchange.order))]
    shapes = [(exchange.rows[exchange.team_rank], end - first, out.shape[2]) for first, end in shares.heads]
    return torch.cat(_exchange(by_position.split(exchange.rows), shapes, exchange.team), dim=1)


def _meet(sent: Sequence[Tensor], heads: int, exchange: HeadExchange) -> Tensor:
    """Send tensors [n, heads, d], one a rank; return all rows of the split samples in order, [N, heads here, d]."""
    shapes = [(rows, heads, sent[0].shape[2]) for rows in exchange.rows]
    return torch.cat(_exchange(sent, shapes, exchange.team))[platform.to_device(exchange.order)]


def features_to_tokens(made: Sequence[Tensor], shard: PackShard) -> tuple[Tensor, ...]:
    """Send image features [encoded, ...] to the ranks of the team with their tokens; return those for tokens here."""
    features, route = torch.stack(tuple(made), dim=1), shard.features
    assert shard.team is not None
    sent = features[platform.to_device(route.send_rows)].split(route.send_counts)
    arrived = _exchange(sent, [(count, *features.shape[1:]) for count in route.receive_counts], shard.team)
    return torch.cat(arrived)[platform.to_device(route.receive_rows)].unbind(1)


def _exchange(sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], team: ProcessGroup) -> list[Tensor]:
    """Send one tensor to every rank of the team; return those received, which have `shapes`."""
    gives = [tensor.numel() for tensor in sent]
    takes = [torch.Size(shape).numel() for shape in shapes]
    flat: Tensor = _AllToAll.apply(torch.cat([tensor.reshape(-1) for tensor in sent]), gives, takes, team)
    return [part.view(shape) for part, shape in zip(flat.split(takes), shapes, strict=True)]


class _AllToAll(torch.autograd.Function):
    """An all-to-all of flat tensors with uneven splits; all ranks of the team must call it, and its backward."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, gives: list[int], takes: list[int], team: ProcessGroup) -> Tensor:
        ctx.gives, ctx.takes, ctx.team = gives, takes, team
        with watched.by(False):
            return _all_to_all(sent, gives, takes, team)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with watched.by(True):
            return _all_to_all(gradient.contiguous(), ctx.takes, ctx.gives, ctx.team), None, None, None


def _all_to_all(sent: Tensor, gives: list[int], takes: list[int], team: ProcessGroup) -> Tensor:
    taken = sent.new_empty(sum(takes))
    dist.all_to_all_single(taken, sent, takes, gives, team)
    return taken
