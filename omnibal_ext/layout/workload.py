"""The packs a layout is judged on: some iterations of the stream that training will run."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import Packs, pack_loads
from omnibal_ext.sizes import Sizes


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
    return packs_of_loads(np.asarray(index.loads), _some_iterations(stream, iterations))


def _some_iterations(stream: PackStream, iterations: int) -> NDArray[np.int64]:
    parts = min(iterations, stream.iterations_per_epoch)
    chosen = (np.arange(parts) + 0.5) * stream.iterations_per_epoch / parts
    return np.stack([stream.iteration(int(i)) for i in chosen])


@dataclass(frozen=True, slots=True)
class Workload:
    """A corpus packed one way, and some of its iterations."""

    packs: PackSizes
    """What the devices run, padding included: [iterations, data-parallel ranks, microbatches]."""
    needed: PackSizes
    """The same packs without padding."""
    samples: float
    """Mean samples of an iteration."""
    vit_budget: int
    llm_budget: int


def pack_workload(sizes: Sizes, options: PackOptions, iterations: int = 6) -> Workload:
    """Pack a corpus as training would, and keep some iterations. Raises UserError as packing does."""
    with tempfile.TemporaryDirectory() as folder:
        index, _ = build_index(sizes, Path(folder) / "index", options)
        stream = PackStream(index, options.data_parallel_size, options.micro_batches)
        chosen = _some_iterations(stream, iterations)
        bare = pack_loads(Packs(np.asarray(index.pack_offsets), np.asarray(index.sample_ids)), sizes)
        counts = np.diff(index.pack_offsets)
        samples = np.where(chosen == EMPTY_PACK, 0, counts[chosen]).sum() / len(chosen)
        packs, needed = packs_of_loads(np.array(index.loads), chosen), packs_of_loads(bare, chosen)
        return Workload(packs, needed, float(samples), index.vit_budget, index.llm_budget)


def packs_of_loads(loads: NDArray[np.int64], iterations: NDArray[np.int64]) -> PackSizes:
    """Sizes of packs numbered int64 [iterations, ranks, microbatches], from loads int64 [packs, 3] (tiles, tokens,
    sum of squared lengths); empty packs cost nothing."""
    sizes = np.where((iterations == EMPTY_PACK)[..., None], 0, loads[iterations])
    return PackSizes(*(np.ascontiguousarray(sizes[..., column]) for column in range(3)))
