"""The packs a layout is judged on: some iterations of the stream that training will run."""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index import PackedIndex
from omnibal_ext.profile_data import PackSizes, Profile


def packs_of_index(index: PackedIndex, profile: Profile, microbatches: int, iterations: int = 4) -> PackSizes:
    """Iterations from the middle of equal parts of epoch 0, as int64 [iterations, data-parallel ranks, microbatches].

    Raises UserError if the index was packed for another number of microbatches, or larger budgets than the profile's.
    """
    if index.global_batch % microbatches:
        raise UserError(
            f"{index.folder}: packed for a global batch of {index.global_batch} packs, which --num-microbatches "
            f"{microbatches} does not divide: pack again, or plan for a divisor"
        )
    for name in ("vit_budget", "llm_budget"):
        if getattr(index, name) > getattr(profile, name):
            raise UserError(
                f"{index.folder}: packed for {name} {getattr(index, name)}, but profiled at {getattr(profile, name)}: "
                "profile again at the index's budgets"
            )
    stream = PackStream(index, index.global_batch // microbatches, microbatches)
    parts = min(iterations, stream.iterations_per_epoch)
    chosen = (np.arange(parts) + 0.5) * stream.iterations_per_epoch / parts
    return packs_of_loads(np.asarray(index.loads), np.stack([stream.iteration(int(i)) for i in chosen]))


def packs_of_loads(loads: NDArray[np.int64], iterations: NDArray[np.int64]) -> PackSizes:
    """Sizes of packs numbered int64 [iterations, ranks, microbatches], from loads int64 [packs, 3] (tiles, tokens,
    sum of squared lengths); empty packs cost nothing."""
    sizes = np.where((iterations == EMPTY_PACK)[..., None], 0, loads[iterations])
    return PackSizes(*(np.ascontiguousarray(sizes[..., column]) for column in range(3)))
