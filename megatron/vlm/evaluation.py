"""An evaluation runs one pass over the held-out packs, the same every time."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream, assign_zigzag
from omnibal_ext.packing.index.packed_index import PackedIndex

EVALUATIONS = 10
"""Evaluations of a run without --eval-interval."""


@dataclass(frozen=True)
class HeldOutPass:
    """Every pack of an index once, in order, distributed over the data-parallel ranks.

    An iteration is the index's global batch, rounded up to a multiple of the ranks. The last one is filled with empty
    packs of loss weight 0.
    """

    index: PackedIndex
    data_parallel_size: int

    @property
    def global_batch(self) -> int:
        """Packs of an iteration over all ranks; a pack of several ranks counts once for each."""
        return -(-self.index.global_batch // self.data_parallel_size) * self.data_parallel_size

    @property
    def iterations(self) -> int:
        """Iterations of a pass."""
        return len(self._distributed())

    def of_rank(self, rank: int) -> Iterator[int]:
        """Iterate over a data-parallel rank's pack numbers, pass after pass without end."""
        return cycle(self._distributed()[:, rank].ravel().tolist())

    def _distributed(self) -> NDArray[np.int64]:
        """Return the packs, [iterations, ranks, packs], of the first stored epoch, which has every sample."""
        if self.index.wide is not None:
            each = self.index.global_batch // self.data_parallel_size
            stream = PackStream(self.index, self.data_parallel_size, each, "empty")
            return stream.iterations(0, stream.first_iteration(1))
        packs = np.arange(self.index.manifest["epoch_packs"][0])
        missing = -len(packs) % self.global_batch
        filled = np.append(packs, np.full(missing, EMPTY_PACK)).reshape(-1, self.global_batch)
        return assign_zigzag(filled, self.data_parallel_size)


def set_evaluation(args: Namespace) -> None:
    """Set Megatron's flags of evaluation in the validated `args` from --eval-data and --eval-packs.

    Raises UserError if only one of the two is given.
    """
    if not args.eval_data and not args.eval_packs:
        args.eval_iters, args.eval_interval = 0, 10**9  # Megatron divides by it
        return
    for given, missing in (("eval_data", "eval_packs"), ("eval_packs", "eval_data")):
        if not getattr(args, missing):
            flag, other = f"--{given.replace('_', '-')}", f"--{missing.replace('_', '-')}"
            raise UserError(f"{flag} {getattr(args, given)} without {other}: evaluation needs a dataset and its packs")
    held_out = HeldOutPass(PackedIndex.open(args.eval_packs), args.data_parallel_size)
    args.eval_iters, args.eval_global_batch_size = held_out.iterations, held_out.global_batch
    iterations = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    args.eval_interval = args.eval_interval or max(1, iterations // EVALUATIONS)
