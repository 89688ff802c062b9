"""The order of a pack's image and audio tokens, when several ranks have encoded its images and sounds.

    units of the pack           0   1   2   3            their workers (part, tensor rank): 0.0  0.1  0.0  1.0
    part 0, tensor rank 0       0   2                    image tokens of its units, then their features
    part 0, tensor rank 1       1
    part 1, tensor rank 0       3
    enters the first stage      0   1   2   3            image tokens of the pack, then its features

Audio tokens follow behind these, on every worker and in the first stage's input; they have no features.

The first stage's pipeline rank receives the tokens of all parts, each tensor rank those of its number, and gathers them
over the tensor ranks. Shapes follow from the pack's sizes and the plan, and are not exchanged.
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
class ImageRows:
    """The rows of one pack's images and sounds."""

    units: tuple[int, ...]
    """Rows of each unit of images."""
    sounds: tuple[int, ...]
    """Rows of each sample's sounds."""
    workers: tuple[int, ...]
    """The worker that encodes each of `units`, then of `sounds`: part x tensor ranks + tensor rank."""
    parts: int
    tensor_ranks: int
    copies: int
    """Rows of each image token: itself, and its features."""

    def count(self, part: int, tensor_rank: int) -> int:
        """Rows that a worker encodes."""
        return len(self._places[part * self.tensor_ranks + tensor_rank])

    @property
    def total(self) -> int:
        """Rows that enter the first stage."""
        return self.copies * sum(self.units) + sum(self.sounds)

    @cached_property
    def _places(self) -> list[Ints]:
        """For every worker, the indices of its rows in the first stage's input, in the order in which it encodes."""
        sizes, images = (*self.units, *self.sounds), sum(self.units)
        rows: list[list[Ints]] = [[] for _ in range(self.parts * self.tensor_ranks)]
        for begin, count, worker in zip(np.cumsum([0, *sizes]), sizes, self.workers, strict=False):
            rows[worker].append(np.arange(begin, begin + count))
        return [self._with_features(np.concatenate([np.zeros(0, np.int64), *found]), images) for found in rows]

    def _with_features(self, tokens: Ints, images: int) -> Ints:
        """The rows of tokens numbered as if they had no features; the first `images` have."""
        shown, heard = tokens[tokens < images], tokens[tokens >= images]
        features = [copy * images + shown for copy in range(self.copies)]
        return np.concatenate([*features, heard + (self.copies - 1) * images])

    def assemble(self, pieces: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
        """The first stage's input, from this tensor rank's rows of all parts. Collective over tensor ranks."""
        piece = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        if not self.total:
            return piece
        room = max(sum(self.count(part, rank) for part in range(self.parts)) for rank in range(self.tensor_ranks))
        if self.tensor_ranks > 1:
            mine = piece.new_zeros(room, *piece.shape[1:])
            mine[: len(piece)] = piece
            piece = piece.new_empty(room * self.tensor_ranks, *piece.shape[1:])
            dist.all_gather_into_tensor(piece, mine, group=group)
        order = np.empty(self.total, np.int64)
        for rank in range(self.tensor_ranks):
            begin = rank * room
            for places in self._places[rank :: self.tensor_ranks]:
                order[places] = np.arange(begin, begin + len(places))
                begin += len(places)
        return _taken(piece, order)

    def piece(self, whole: Tensor, part: int, tensor_rank: int) -> Tensor:
        """A worker's rows of a tensor with the rows of the first stage's input, in the worker's order."""
        return _taken(whole, self._places[part * self.tensor_ranks + tensor_rank])


def _taken(rows: Tensor, order: Ints) -> Tensor:
    if len(order) == len(rows) and np.array_equal(order, np.arange(len(order))):
        return rows
    return rows.index_select(0, platform.to_device(torch.from_numpy(order)))
