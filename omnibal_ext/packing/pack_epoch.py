"""Pack one epoch of a corpus and order its packs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.epoch_order import opened_groups
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import OPENED, balance_iterations, place_opened, stored_order
from omnibal_ext.packing.ordering.metrics import fewest_packs, lower_bound_packs
from omnibal_ext.packing.ordering.order_packs import MANY, order_packs
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import LOADS, LoadedPacks, PackList, pack_loads
from omnibal_ext.packing.twins import Twins, count_types, random_parts
from omnibal_ext.packing.wide_epoch import narrow_iterations, pack_wide
from omnibal_ext.sizes import Sizes

Pack = Callable[[Sizes, PackOptions, int], PackList]
"""(sizes of samples that fit the budgets, options, seed) -> their packs."""
AT_ONCE = 1 << 23
"""Samples that are packed together, about; more are divided, so that memory has a bound."""
ITERATIONS = 32
"""Iterations, at least, that are packed for twins: the last of each copy are packed anew."""


class Epoch(NamedTuple):
    """The packs of an epoch in running order."""

    pieces: Iterable[LoadedPacks]
    """Lists of packs that follow each other; those of a large corpus are made as they are read, once."""
    groups: list[int]
    """Iterations of each sub-epoch, when all pieces are read."""
    widths: Ints | None = None
    """[P]; with `slots` [I, D, M] only if packs may be wide; each sub-epoch then fills complete iterations."""
    slots: Ints | None = None

    @property
    def packs(self) -> PackList:
        """All packs as one list; reads `pieces`, which a large corpus gives only once."""
        return PackList.concatenate([piece.packs for piece in self.pieces])

    @property
    def loads(self) -> Ints:
        """Loads of `packs`, [P, K]; reads `pieces` too."""
        return np.concatenate([piece.loads for piece in self.pieces])


def pack(sizes: Sizes, options: PackOptions, seed: int) -> PackList:
    """Return packs of samples that all fit the budgets, made by `options.method`; in no order of iterations yet."""
    packers: dict[str, Callable[[], PackList]] = {
        "balanced": lambda: pack_balanced(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=seed),
        "isf": lambda: pack_isf(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=seed),
        "random": lambda: pack_random(sizes, options.samples_per_pack, seed),
        "length_group": lambda: pack_length_group(sizes, options.samples_per_pack, seed),
        "device_group": lambda: pack_device_group(
            sizes, options.samples_per_pack, options.data_parallel_size, options.micro_batches, seed
        ),
    }
    return packers[options.method]()


def pack_epoch(
    corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, epoch: int, make: Pack = pack
) -> Epoch:
    """Pack one epoch by `make`, and order its packs by iteration. `reasons`: of each sample 0, or why it fits no pack.

    1. Take the samples of each sub-epoch; those with `reasons` above 0 are left out or get packs of their own.
    2. Pack each exchange group of each sub-epoch separately.
    3. Equalize and order the packs of each sub-epoch; all leftover packs come last.
    4. Where packs number at least 2 `MANY` (131,072), or samples exceed `AT_ONCE` (8 million), divide the work: alike
       samples form sets (`Twins`), 2 and 3 run once for the longest of each set, and each copy of the others takes
       their places. More than `AT_ONCE` samples without twins are random sub-epochs.

    Raises:
        UserError: the weights leave no sample.
    """
    packed: NDArray[np.bool_] = np.broadcast_to(np.True_, len(reasons))
    if options.oversize == "reject" and reasons.any():
        packed = reasons == 0
    packed = packed if corpus.kept is None else packed & corpus.kept
    work = _Work(corpus, reasons, options, costs, options.seed + epoch, make)
    may_divide = work.may_divide
    if corpus.is_plain and may_divide:
        if twins := work.twins_of(packed):
            return _epoch(work, [twins], epoch, is_one=True)
        if (count := -(-int(np.count_nonzero(packed)) // AT_ONCE)) > 1:
            return _epoch(work, random_parts(packed, count, work.seed), epoch, is_one=False)
    work = work._replace(corpus=corpus.in_memory())
    most_sub_epochs = max(1, corpus.sizes.total("tokens") // (options.llm_budget * options.global_batch))
    parts = [each for each in corpus.epoch_samples(epoch, options.seed, packed, most_sub_epochs) if len(each)]
    if not parts:
        raise UserError(f"epoch {epoch} has no samples: raise --weights, or pack more input files")
    if options.wide:
        options = replace(options, narrow_first=0) if epoch else options
        return _pack_wide(work.corpus, parts, options, costs, work.seed)
    if corpus.is_plain or not may_divide:
        return _epoch(work, parts, epoch, len(parts) == 1)
    times = (np.bincount(part, minlength=len(packed)) for part in parts)
    twins_of = [work.twins_of(each > 0) if each.max() == 1 else None for each in times]
    return _epoch(work, [twins or part for twins, part in zip(twins_of, parts, strict=True)], epoch, len(parts) == 1)


def _epoch(work: "_Work", parts: Iterable[Twins | Ints], epoch: int, is_one: bool) -> Epoch:
    """Pack and order sub-epochs, given as twins or as sample numbers; of more than `AT_ONCE` samples in all, packs are
    made only when they are read."""
    groups: list[int] = []
    pieces = _pieces(work, parts, groups, epoch if is_one and work.options.micro_batches == 1 else None)
    if len(work.corpus.sizes) <= AT_ONCE:
        return Epoch([LoadedPacks.concatenate(list(pieces))], groups)
    return Epoch(pieces, groups)


def _pieces(
    work: "_Work", parts: Iterable[Twins | Ints], groups: list[int], alike: int | None
) -> Iterator[LoadedPacks]:
    """Yield the packs of sub-epochs, then all leftover packs; add the iterations of each sub-epoch to `groups`.

    `alike`: an epoch's number; its iterations that later passes split are chosen to cost what leftover packs do.
    """
    batch, balanced, leftover = work.options.global_batch, work.options.method == "balanced", work.none
    for part in parts:
        made, count, left = work.of_twins(part, leftover) if isinstance(part, Twins) else work.whole(part, leftover)
        groups.append(count)
        leftover = LoadedPacks.concatenate([leftover, left])
        opened = np.zeros(0, np.int64)
        if balanced and alike is not None and count > 1:
            opened = opened_groups(work.options.seed, alike, count)[:OPENED]
        first = 0
        for piece in made:
            here = opened[(opened >= first) & (opened < first + len(piece.packs) // batch)] - first
            first += len(piece.packs) // batch
            if len(here):
                order = place_opened(work.seconds(LoadedPacks.concatenate([piece, leftover])), batch, here)
                piece = piece.reordered(order[: len(piece.packs)])  # noqa: PLW2901
            yield piece
    if balanced:  # over ranks, iterations that leftover packs fill completely
        complete = np.arange(len(leftover.packs) // batch * batch).reshape(-1, batch)
        iterations = balance_iterations(work.seconds(leftover), complete, work.options.data_parallel_size)
        order = stored_order(iterations).ravel()
        leftover = leftover.reordered(np.append(order, np.arange(len(order), len(leftover.packs))))
    yield leftover


class _Work(NamedTuple):
    """What all sub-epochs of an epoch are packed with.

    `whole` and `of_twins` return a sub-epoch's packs in the order of its iterations, the number of iterations, and the
    leftover packs, which fill none. Their `others` are leftover packs of earlier sub-epochs.
    """

    corpus: Corpus
    reasons: NDArray[np.int8]
    options: PackOptions
    costs: PackCosts
    seed: int
    make: Pack

    @property
    def none(self) -> LoadedPacks:
        """An empty list of packs."""
        nothing = PackList.concatenate([])
        return LoadedPacks(nothing, pack_loads(nothing, self.corpus.sizes))

    def seconds(self, packs: LoadedPacks) -> Floats:
        return self.costs.waited_for(packs.loads, (*LOADS, *self.corpus.sizes.more), self.options.one_sum)

    @property
    def may_divide(self) -> bool:
        """Whether samples are so many that an epoch is packed in divisions, and any of them may share packs."""
        sizes, options = self.corpus.sizes, self.options
        alone = options.oversize == "alone" and bool(self.reasons.any())
        if options.method != "balanced" or options.wide or alone or self.corpus.groups is not None:
            return False
        return len(sizes) > AT_ONCE or lower_bound_packs(sizes, options.all_budgets) >= 2 * MANY

    def twins_of(self, packed: NDArray[np.bool_]) -> Twins | None:
        """Divide `packed` samples into twins, of which a copy fills about `MANY` packs and has about `AT_ONCE` samples,
        or more where these would be less than `ITERATIONS` iterations; None for one copy, or samples too different."""
        types = count_types(self.corpus, packed, self.options.all_budgets)
        if types is None:
            return None
        bound = fewest_packs(types.totals(), self.options.all_budgets)
        count = max(bound // MANY, -(-int(types.counts.sum()) // AT_ONCE))
        count = min(count, bound // (ITERATIONS * self.options.global_batch))
        twins = Twins(self.corpus, packed, types, count, self.seed) if count > 1 else None
        return twins if twins is not None and twins.are_alike else None

    def whole(self, samples: Ints, others: LoadedPacks) -> tuple[Iterable[LoadedPacks], int, LoadedPacks]:
        """Pack and order samples, whose numbers ascend; return the packs of complete iterations, how many iterations
        these are, and leftover packs. `others`: leftover packs of earlier sub-epochs."""
        if len(self.corpus.sizes) > AT_ONCE and self.corpus.is_plain and self.may_divide:
            ordered = self.taken(samples, others)
        else:
            packs, exchange_groups = _pack_sub_epoch(self, samples)
            if self.options.method == "balanced":
                arguments = self.options, self.costs, self.seed, exchange_groups, others.packs
                packs = order_packs(self.corpus, packs, *arguments)
            else:
                packs = packs.reordered(baseline_order(len(packs), self.options, self.seed))
            ordered = LoadedPacks(packs, pack_loads(packs, self.corpus.sizes, self.options.pad))
        complete = len(ordered.packs) // self.options.global_batch * self.options.global_batch
        return [ordered[:complete]], complete // self.options.global_batch, ordered[complete:]

    def of_twins(self, twins: Twins, others: LoadedPacks) -> tuple[Iterable[LoadedPacks], int, LoadedPacks]:
        """Pack and order the longest of each set of twins, put every copy in their places, pack what is left, and mix
        the iterations of both; return as `whole` does."""
        batch, made = self.options.global_batch, self.make(twins.head.sizes, self.options, self.seed)
        first = order_packs(twins.head, made, self.options, self.costs, self.seed)
        complete = max(0, len(first) // batch - 1)  # some packs more to mix with
        last = self.taken(twins.deal(first.between(0, complete * batch)), others)
        whole = len(last.packs) // batch
        ends = (np.arange(twins.count + 1) * whole // twins.count * batch).tolist()

        def copies() -> Iterator[LoadedPacks]:
            for copy in range(twins.count):
                piece = LoadedPacks.concatenate([twins.copy(copy), last[ends[copy] : ends[copy + 1]]])
                iterations = np.arange(len(piece.packs)).reshape(-1, batch)
                yield piece.reordered(np.random.default_rng((self.seed, 6, copy)).permutation(iterations).ravel())

        return copies(), twins.count * complete + whole, last[whole * batch :]

    def taken(self, samples: Ints, others: LoadedPacks) -> LoadedPacks:
        """Pack and order some samples (numbers ascend) as if the corpus had these alone; return the packs."""
        own, local = self.corpus.take(samples), np.searchsorted(samples, others.packs.sample_ids)
        local[samples[np.minimum(local, len(samples) - 1)] != others.packs.sample_ids] = -1
        others_here, made = PackList(others.packs.pack_offsets, local), self.make(own.sizes, self.options, self.seed)
        packs = order_packs(own, made, self.options, self.costs, self.seed, None, others_here)
        return LoadedPacks(PackList(packs.pack_offsets, samples[packs.sample_ids]), pack_loads(packs, own.sizes))


def _pack_wide(corpus: Corpus, parts: list[Ints], options: PackOptions, costs: PackCosts, seed: int) -> Epoch:
    """Pack sub-epochs with packs of several widths and assign slots; iterations of one-rank packs, if any, first."""
    scheduled = []
    if options.narrow_first:
        narrow, parts[0] = narrow_iterations(corpus, parts[0], partial(_exchange_groups, corpus), options, costs, seed)
        scheduled = [narrow]
    scheduled += [pack_wide(corpus, list(_exchange_groups(corpus, samples)), options, costs, seed) for samples in parts]
    first = np.cumsum([0, *(len(part.packs) for part in scheduled)])
    slots = [np.where(part.slots >= 0, part.slots + n, part.slots) for part, n in zip(scheduled, first, strict=False)]
    packs = PackList.concatenate([part.packs for part in scheduled])
    widths = np.concatenate([part.widths for part in scheduled])
    groups = [len(part.slots) for part in scheduled]
    if options.narrow_first:  # later epochs shuffle them among the others
        groups[:2] = [sum(groups[:2])]
    return Epoch([LoadedPacks(packs, pack_loads(packs, corpus.sizes))], groups, widths, np.concatenate(slots))


def _pack_sub_epoch(work: _Work, samples: Ints) -> tuple[PackList, Ints]:
    """Pack samples; oversize ones get packs of their own. Return the packs and the exchange group of each, [P]."""
    corpus, reasons = work.corpus, work.reasons
    oversize = samples[reasons[samples] > 0] if reasons.any() else samples[:0]
    if len(oversize):
        samples = samples[reasons[samples] == 0]
    parts = []
    for group in _exchange_groups(corpus, samples):
        sizes = corpus.sizes if len(group) == len(corpus.sizes) else corpus.sizes.take(group)  # none twice
        packs = work.make(sizes, work.options, work.seed)
        parts.append(PackList(packs.pack_offsets, group[packs.sample_ids]))
    if len(oversize):
        parts.append(PackList(np.arange(len(oversize) + 1), oversize))
    return PackList.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _exchange_groups(corpus: Corpus, samples: Ints) -> Iterator[Ints]:
    """Yield exchange groups: numbers of `samples` that may share packs, of one corpus group, none twice."""
    if len(samples) == 0:
        return
    if corpus.groups is None and (samples[1:] > samples[:-1]).all():  # no copies
        yield samples
        return
    copy = np.arange(len(samples)) - np.searchsorted(samples, samples)
    keys = copy if corpus.groups is None else corpus.groups[samples] * (int(copy.max()) + 1) + copy
    order = np.argsort(keys, kind="stable")
    borders = np.flatnonzero(np.diff(keys[order])) + 1
    yield from np.split(samples[order], borders)


def baseline_order(packs: int, options: PackOptions, seed: int) -> Ints:
    """Return the numbers of a baseline's packs in the order they run: random packs, or random whole iterations."""
    generator = np.random.default_rng((seed, 1))
    if options.method in ("isf", "random"):
        return generator.permutation(packs)
    complete = packs // options.global_batch * options.global_batch
    groups = np.arange(complete).reshape(-1, options.global_batch)
    return np.concatenate([generator.permutation(groups).ravel(), np.arange(complete, packs)])
