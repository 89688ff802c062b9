"""What an epoch costs in batches as other trainers make them, and in balanced packs: the work of `omnibal look`.

Every way batches the same samples: those that fit the budgets. Its figures are those of the index that
`omnibal pack` makes with the same options.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import Packer, build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream, epoch_iterations
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering import metrics
from omnibal_ext.packing.pack_epoch import Epoch, pack_epoch
from omnibal_ext.packing.packers.first_fit import pack_first_fit
from omnibal_ext.packing.packs import LOADS, TILES, TOKENS, LoadedPacks, PackList, pack_loads
from omnibal_ext.reading.checks import Check, integer, listing
from omnibal_ext.reading.document import read_lines
from omnibal_ext.sizes import Sizes

REMEDY = (
    "write a line a step: a list of ranks, each a list of sample numbers, or a list of such lists, one a microbatch"
)


@dataclass(frozen=True, slots=True)
class OnRanks:
    """What an epoch of batches costs on a number of data-parallel ranks, computed from sizes."""

    steps: int
    """Optimizer steps of the epoch."""
    wait: float
    """Fraction of device time that ranks wait for the slowest of their step."""
    seconds: float
    """Device seconds a sample, waiting included: all ranks' time over the epoch, divided by its samples."""


@dataclass(frozen=True, slots=True)
class Batching:
    """A way to batch samples, and what an epoch of it costs. A batch is what a device runs at once."""

    name: str
    batches: int
    samples_per_batch: float
    padding: float
    """Fraction of a batch's tokens that are padding, mean over batches (`metrics.pad_ratio`)."""
    most_tiles: int
    most_tokens: int
    """Most tokens of a batch, with its padding."""
    on_ranks: Mapping[int, OnRanks]
    """Waiting and time by number of data-parallel ranks."""

    def against(self, ours: "Batching", ranks: int) -> str:
        """Return a sentence: what this way loses against `ours` on so many ranks; figures of `ours` in brackets."""
        found, best = self.on_ranks[ranks], ours.on_ranks[ranks]
        times = found.seconds / best.seconds
        return (
            f"{self.name}, on {ranks} ranks: a sample takes {times:.2f} times the device time of {ours.name}, "
            f"{max(0.0, 1 - 1 / times):.0%} is lost: padding {self.padding:.1%} (theirs {ours.padding:.1%}), waiting "
            f"{found.wait:.1%} ({best.wait:.1%}), largest batch {self.most_tiles:,} tiles ({ours.most_tiles:,}) and "
            f"{self.most_tokens:,} tokens ({ours.most_tokens:,})"
        )


@dataclass(frozen=True, slots=True)
class Way:
    """How to batch: options, and what makes and orders the packs of an epoch."""

    name: str
    options: PackOptions
    packer: Packer = pack_epoch


def ways(options: PackOptions, batches: Sequence[int]) -> list[Way]:
    """List the ways to compare, within the same budgets: padded, by tokens, by tokens and tiles, and last balanced
    packs. Padded ones, random and of similar length, are there for each number of samples in `batches`."""
    sized = [replace(options, samples_per_pack=batch) for batch in batches]
    return [
        *(Way(f"{one.samples_per_pack} random, padded", replace(one, method="random")) for one in sized),
        *(
            Way(f"{one.samples_per_pack} of similar length, padded", replace(one, method="length_group"))
            for one in sized
        ),
        Way("packs by tokens", replace(options, method="isf"), pack_by_tokens),
        Way("packs by tokens, tiles (ISF)", replace(options, method="isf")),
        Way("balanced packs", options),
    ]


def pack_by_tokens(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, _: PackCosts, epoch: int) -> Epoch:
    """Pack as text packers do: first fit by tokens alone, longest first; then shuffle the packs. A `Packer`."""
    seed = options.seed + epoch
    samples = np.concatenate(corpus.epoch_samples(epoch, options.seed, reasons == 0, 1))
    packs = pack_first_fit(corpus.sizes.tokens[samples, None], np.array([options.llm_budget]), seed)
    order = np.random.default_rng((seed, 1)).permutation(len(packs))
    packs = PackList(packs.pack_offsets, samples[packs.sample_ids]).reordered(order)
    return Epoch([LoadedPacks(packs, pack_loads(packs, corpus.sizes))], [len(packs) // options.global_batch])


def measure(corpus: Corpus, way: Way, ranks: Sequence[int], costs: PackCosts) -> Batching:
    """Pack the samples by a way for each number of ranks, in a temporary folder; compute waits and padding.

    Raises:
        UserError: no sample fits the budgets.
    """
    summaries, found = [], {}
    for size in ranks:
        options = replace(way.options, data_parallel_size=size)
        with tempfile.TemporaryDirectory() as folder:
            index, summary = build_index(corpus, Path(folder) / "packs", options, costs=costs, packer=way.packer)
            iterations = epoch_iterations(PackStream(index, size, options.micro_batches))
            seconds, counts = index.seconds(np.arange(index.num_packs)), np.diff(index.pack_offsets)
            found[size] = _on_ranks(iterations, seconds, counts)
        summaries.append(summary)
    return Batching(
        way.name,
        batches=summaries[0].packs,
        samples_per_batch=summaries[0].samples_per_pack,
        padding=summaries[0].pad_ratio,
        most_tiles=max(summary.longest_tiles for summary in summaries),
        most_tokens=max(summary.longest_tokens for summary in summaries),
        on_ranks=found,
    )


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of a user's sampler, and which rank runs each in every step."""

    batches: PackList
    iterations: Ints
    """Number of the batch that each rank runs, [I, D, M]; `EMPTY_PACK`: none."""

    @classmethod
    def read(cls, path: str | Path, samples: int) -> "Order":
        """Read JSON Lines: of each step a list of ranks, and of each rank a list of sample numbers, or a list of such
        lists, one a microbatch. Numbers are 0 to `samples` - 1.

        Raises:
            UserError: naming the line at fault.
        """
        batches: list[list[int]] = []
        steps: list[list[list[int]]] = []
        for number, step in enumerate(read_lines(path, _step(samples), REMEDY), 1):
            steps.append([[_numbered(batch, batches) for batch in rank] for rank in step])
            shape, first = [(len(one), {len(rank) for rank in one}) for one in (steps[-1], steps[0])]
            if shape != first or len(shape[1]) != 1:
                raise UserError(
                    f"{path}: line {number}: {_shape_of(shape)}, the first line has {_shape_of(first)}; give all "
                    "steps as many, with [] for what is empty, or leave out a last step that is not whole"
                )
        if not batches:
            raise UserError(f"{path}: has no samples; {REMEDY}")
        return cls(PackList.from_lists(batches), np.array(steps, np.int64))

    def measure(self, name: str, sizes: Sizes, pad: bool, costs: PackCosts, one_sum: bool) -> Batching:
        """Compute waits and padding. `pad`: batches are padded to their longest sample, not joined to one sequence."""
        loads = pack_loads(self.batches, sizes, pad)
        seconds = costs.waited_for(loads, (*LOADS, *sizes.more), one_sum)
        return Batching(
            name,
            batches=len(self.batches),
            samples_per_batch=len(self.batches.sample_ids) / len(self.batches),
            padding=metrics.pad_ratio(self.batches, sizes, pad),
            most_tiles=int(loads[:, TILES].max()),
            most_tokens=int(loads[:, TOKENS].max()),
            on_ranks={self.iterations.shape[1]: _on_ranks(self.iterations, seconds, self.batches.counts)},
        )


def _on_ranks(iterations: Ints, seconds: Floats, counts: Ints) -> OnRanks:
    """Compute what iterations [I, D, M] cost; of batches: `seconds` [P, parts], `counts` [P] of samples."""
    of_ranks = metrics.rank_loads(iterations, seconds)
    ranks, samples = iterations.shape[1], int(metrics.rank_loads(iterations, counts).sum())
    busy = float(of_ranks.max(axis=1).sum())
    return OnRanks(len(iterations), metrics.wait(of_ranks), ranks * busy / samples)


def _step(samples: int) -> Check[list[list[list[int]]]]:
    """Return a function that checks an order's line and returns its sample numbers by rank and microbatch; a line that
    names no microbatches has one a rank."""
    batch = listing(integer(0, samples - 1))
    plain, nested = listing(batch, least=1), listing(listing(batch, least=1), least=1)

    def check(where: str, value: Any) -> list[list[list[int]]]:
        if any(isinstance(one, list) for rank in _items(value) for one in _items(rank)):
            return nested(where, value)
        return [[one] for one in plain(where, value)]

    return check


def _items(value: Any) -> Iterator[Any]:
    return iter(value if isinstance(value, list) else ())


def _numbered(batch: list[int], batches: list[list[int]]) -> int:
    """Append a batch to `batches`, and return its number there; an empty one is not appended: `EMPTY_PACK`."""
    if not batch:
        return EMPTY_PACK
    batches.append(batch)
    return len(batches) - 1


def _shape_of(shape: tuple[int, set[int]]) -> str:
    ranks, micro_batches = shape
    return f"{ranks} ranks of {' and '.join(map(str, sorted(micro_batches)))} microbatches"
