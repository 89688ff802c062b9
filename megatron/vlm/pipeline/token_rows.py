"""Order of the tokens that encoders make of a pack, when several ranks have encoded it.

    pieces of the pack           0   1   2   3            their workers (share, tensor rank): 0.0  0.1  0.0  1.0
    share 0, tensor rank 0      0   2                    image tokens of its pieces, then their features
    share 0, tensor rank 1      1
    share 1, tensor rank 0      3
    enters the first stage      0   1   2   3            image tokens of the pack, then its features

The tokens of one encoder follow behind those of another, in the order of `flow.in_rows`: audio tokens behind image
tokens and their features.

The first stage's pipeline rank receives the tokens of all shares, each tensor rank those of its number, and gathers
them over the tensor ranks. Shapes follow from the pack's sizes and the plan, and are not exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.vlm import platform
from omnibal_ext.arrays import Ints


@dataclass(frozen=True)
class EncoderRows:
    """Rows that one encoder makes of a pack's pieces: images, tiles or sounds."""

    pieces: tuple[int, ...]
    """Number of tokens of each piece."""
    copies: int = 1
    """Number of rows of each token: itself, and its features."""

    @property
    def total(self) -> int:
        """Number of rows of all pieces."""
        return self.copies * sum(self.pieces)


@dataclass(frozen=True)
class TokenRows:
    """Rows of the first stage's input by worker that makes them: a tensor rank of a pipeline rank that encodes."""

    encoders: tuple[EncoderRows, ...]
    """One for each encoder, in the order of `flow.in_rows`."""
    workers: tuple[int, ...]
    """Worker that encodes each piece, of one encoder after the other: share x tensor ranks + tensor rank."""
    shares: int
    tensor_ranks: int

    def count(self, share: int, tensor_rank: int) -> int:
        """Return the number of rows that a worker encodes."""
        return len(self._positions[share * self.tensor_ranks + tensor_rank])

    @property
    def total(self) -> int:
        """Number of rows that enter the first stage."""
        return sum(encoder.total for encoder in self.encoders)

    @cached_property
    def _positions(self) -> list[Ints]:
        """Indices of every worker's rows in the first stage's input, in the order in which it encodes."""
        found: list[list[Ints]] = [[np.zeros(0, np.int64)] for _ in range(self.shares * self.tensor_ranks)]
        workers, first = iter(self.workers), 0
        for encoder in self.encoders:
            mine = [worker for _, worker in zip(encoder.pieces, workers, strict=False)]
            tokens, whose = sum(encoder.pieces), np.repeat(np.array(mine, np.int64), encoder.pieces)
            for worker in set(mine):
                own = np.flatnonzero(whose == worker)
                found[worker] += [first + copy * tokens + own for copy in range(encoder.copies)]
            first += encoder.total
        return [*map(np.concatenate, found)]

    def assemble(self, pieces: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
        """Return the first stage's input [rows, 1, width] in the pack's order; `pieces` are the rows that reached this
        tensor rank, one tensor a share. Collective over `group`, the tensor ranks."""
        piece = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        if not self.total:
            return piece
        room = max(sum(self.count(share, rank) for share in range(self.shares)) for rank in range(self.tensor_ranks))
        if self.tensor_ranks > 1:
            mine = piece.new_zeros(room, *piece.shape[1:])
            mine[: len(piece)] = piece
            piece = piece.new_empty(room * self.tensor_ranks, *piece.shape[1:])
            dist.all_gather_into_tensor(piece, mine, group=group)
        order = np.empty(self.total, np.int64)
        for rank in range(self.tensor_ranks):
            begin = rank * room
            for positions in self._positions[rank :: self.tensor_ranks]:
                order[positions] = np.arange(begin, begin + len(positions))
                begin += len(positions)
        return _taken(piece, order)

    def piece(self, whole: Tensor, share: int, tensor_rank: int) -> Tensor:
        """Return a worker's rows, in its order, of `whole`, a tensor with the rows of the first stage's input."""
        return _taken(whole, self._positions[share * self.tensor_ranks + tensor_rank])


def _taken(rows: Tensor, order: Ints) -> Tensor:
    if len(order) == len(rows) and np.array_equal(order, np.arange(len(order))):
        return rows
    return rows.index_select(0, platform.to_device(torch.from_numpy(order)))
