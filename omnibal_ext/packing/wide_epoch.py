"""Pack and order a sub-epoch that has samples beyond one rank's budgets, with packs of several widths.

If ranks run several packs per iteration, iterations mix widths (`ordering/mixed_widths.py`). If ranks would wait then,
as with one pack per rank, each iteration has packs of one width and of equal cost.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import assign_zigzag, balance_iterations
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.mixed_widths import NarrowSamples, WidePacks, mixed_width_iterations
from omnibal_ext.packing.ordering.order_packs import order_packs
from omnibal_ext.packing.ordering.slots import SlottedPacks, fill_fewest_iterations
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.fill_groups import Pool, fill_groups
from omnibal_ext.packing.packers.first_fit import pack_first_fit
from omnibal_ext.packing.packs import EMPTY_PACK, LOADS, PackList
from omnibal_ext.packing.shard_loads import EXCHANGED, shard_loads
from omnibal_ext.packing.widths import limited_sizes, sample_widths

SHORT = 16
"""Samples of at most 1 / SHORT of a rank's budgets fill up wide packs; complete on one rank, they keep shards equal."""


def pack_wide(
    corpus: Corpus, exchange_groups: Sequence[Ints], options: PackOptions, costs: PackCosts, seed: int
) -> SlottedPacks:
    """Pack a sub-epoch with packs of one or more ranks and assign slots; exchange groups share no packs.

    Iterations mix widths, or have one width each, whichever lets ranks wait less.
    """
    sub_epoch = _SubEpoch(corpus, options, costs, seed)
    found = []
    if len(exchange_groups) == 1 and (mixed := sub_epoch.mixed(exchange_groups[0])):
        found.append(mixed)
        if sub_epoch.wait(mixed) <= options.wait:
            return mixed
    found.append(sub_epoch.single_width(exchange_groups))
    return min(found, key=sub_epoch.wait)


def narrow_iterations(
    corpus: Corpus, samples: Ints, split: Callable[[Ints], Iterable[Ints]], options: PackOptions, costs: PackCosts,
    seed: int,
) -> tuple[SlottedPacks, Ints]:  # fmt: skip
    """Fill `options.narrow_first` iterations with random samples that fit one rank; also return all other samples.

    A curriculum: HBP (arXiv 2503.07680) trains its first 500 steps on the shortest level alone.

    Args:
        samples: those of a sub-epoch, ascending [n].
        split: yields the exchange groups of samples.

    Raises:
        UserError: there are too few such samples.
    """
    sub_epoch, iterations = _SubEpoch(corpus, options, costs, seed), options.narrow_first
    narrow = sub_epoch.widths(samples) == 1
    drawn = np.random.default_rng((seed, 4)).permutation(samples[narrow])
    sizes, budgets = sub_epoch.limits(drawn)
    packs_of = np.append(0, (np.cumsum(sizes, axis=0) / np.maximum(budgets, 1)).max(axis=1))  # at least
    if packs_of[-1] < (count := iterations * options.global_batch):
        most = int(packs_of[-1]) // options.global_batch
        raise UserError(
            f"--narrow-first {iterations}: samples that fit one rank suffice for {most} iterations of "
            f"{options.global_batch} packs; give at most that"
        )
    enough = int(np.searchsorted(packs_of, count))
    packs, exchange_groups = sub_epoch.narrow(list(split(np.sort(drawn[:enough]))))
    packs = order_packs(corpus, packs, replace(options, widths=(1,)), costs, seed, exchange_groups)
    groups = np.arange(count).reshape(iterations, options.global_batch)
    left = packs.between(count, len(packs)).sample_ids
    slots = assign_zigzag(groups, options.data_parallel_size)
    scheduled = SlottedPacks(packs.between(0, count), np.ones(count, np.int64), slots)
    return scheduled, np.sort(np.concatenate([samples[~narrow], drawn[enough:], left]))


def shard_seconds(packs: PackList, widths: Ints, corpus: Corpus, options: PackOptions, costs: PackCosts) -> Floats:
    """Return the seconds of each pack's fullest shard in the parts of the model that ranks wait for, [P, parts]."""
    names = (*LOADS, *corpus.sizes.more, EXCHANGED)
    return costs.waited_for(shard_loads(packs, corpus.sizes, widths), names, options.one_sum)


class _SubEpoch(NamedTuple):
    corpus: Corpus
    options: PackOptions
    costs: PackCosts
    seed: int

    def seconds(self, packs: PackList, widths: Ints) -> Floats:
        return shard_seconds(packs, widths, self.corpus, self.options, self.costs)

    def wait(self, scheduled: SlottedPacks) -> float:
        return wait(rank_loads(scheduled.slots, self.seconds(scheduled.packs, scheduled.widths)))

    def limits(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the samples' sizes that have a budget, [n, K], and a rank's budgets, [K]."""
        return limited_sizes(self.corpus.sizes.take(samples), self.options)

    def widths(self, samples: Ints) -> Ints:
        return sample_widths(self.corpus.sizes.take(samples), self.options, self.options.widths)

    def mixed(self, samples: Ints) -> SlottedPacks | None:
        """Pack samples to iterations that mix packs of one and of several ranks; None if samples are all for one of
        these, or those for one rank do not fit into the slots left."""
        of_samples = self.widths(samples)
        packs, widths = self._wide(samples, of_samples)
        ids = samples[of_samples == 1]
        if len(ids) == 0 or len(packs) == 0:
            return None
        wide = WidePacks(packs, widths, self.seconds(packs, widths))
        seconds = self.costs.of_samples(self.corpus.sizes.take(ids), self.options.one_sum)
        narrow = NarrowSamples(ids, *self.limits(ids), seconds)
        ranks = self.options.data_parallel_size, self.options.micro_batches
        found = mixed_width_iterations(wide, narrow, *ranks, self.seed, self.options.seconds)
        if found is None:
            return None
        generator = np.random.default_rng((self.seed, 2))
        return SlottedPacks(found.packs, found.widths, generator.permutation(found.slots))

    def single_width(self, exchange_groups: Sequence[Ints]) -> SlottedPacks:
        """Pack samples to iterations of one width each: of several ranks, filled to equal cost; then of one."""
        data_parallel, micro_batches = self.options.data_parallel_size, self.options.micro_batches
        found, left = self._wide_iterations(exchange_groups)
        narrow, group_of_pack = self.narrow(left)
        options = replace(self.options, widths=(1,), wait=self.options.wait / 2)  # ranks wait in wide iterations too
        packs = narrow
        if len(narrow):
            packs = order_packs(self.corpus, narrow, options, self.costs, self.seed, group_of_pack)
        first, batch = sum(len(each.packs) for each in found), options.global_batch
        complete = len(packs) // batch * batch
        groups = first + np.arange(complete).reshape(-1, options.global_batch)
        tables = [*(each.slots for each in found), assign_zigzag(groups, data_parallel)]
        tables = [table for table in tables if len(table)] or [np.zeros((0, data_parallel, micro_batches), np.int64)]
        slots = np.random.default_rng((self.seed, 2)).permutation(np.concatenate(tables))
        all_packs = [*(each.packs for each in found), packs.between(0, complete)]
        widths = [*(each.widths for each in found), np.ones(complete, np.int64)]
        if complete < len(packs):
            last = self._last(packs.between(complete, len(packs)), len(exchange_groups) == 1)
            all_packs.append(last.packs)
            widths.append(last.widths)
            slots = np.concatenate([slots, np.where(last.slots >= 0, last.slots + first + complete, -1)])
        return SlottedPacks(PackList.concatenate(all_packs), np.concatenate(widths), slots)

    def _last(self, packs: PackList, divide: bool) -> SlottedPacks:
        """Assign slots to leftover packs of one rank; `divide`: repack their samples first, balanced over all ranks."""
        widths, ranks = np.ones(len(packs), np.int64), (self.options.data_parallel_size, self.options.micro_batches)
        if divide:
            ids = packs.sample_ids
            seconds = self.costs.of_samples(self.corpus.sizes.take(ids), self.options.one_sum)
            none = WidePacks(packs.between(0, 0), widths[:0], np.zeros((0, seconds.shape[1])))
            if found := mixed_width_iterations(
                none, NarrowSamples(ids, *self.limits(ids), seconds), *ranks, self.seed, self.options.seconds
            ):
                return found
        seconds = self.seconds(packs, widths)
        return SlottedPacks(packs, widths, fill_fewest_iterations(np.arange(len(packs)), seconds, widths, *ranks))

    def _wide_iterations(self, exchange_groups: Sequence[Ints]) -> tuple[list[SlottedPacks], list[Ints]]:
        """Return iterations of each width above 1, and the samples of each group that are left for one rank."""
        pools, found, first = [self._pool(ids[self.widths(ids) == 1]) for ids in exchange_groups], [], 0
        per_group = [self._wide(ids, self.widths(ids)) for ids in exchange_groups]
        for width in self.options.widths:
            chosen = [packs.reordered(np.flatnonzero(widths == width)) for packs, widths in per_group]
            of = np.repeat(np.arange(len(exchange_groups)), [len(packs) for packs in chosen])
            if width > 1 and len(of):
                found.append(self._iterations_of_width(width, PackList.concatenate(chosen), of, pools, first))
                first += len(found[-1].packs)
        moved = [pool.samples[: pool.taken] for pool in pools]
        narrow = [ids[self.widths(ids) == 1] for ids in exchange_groups]
        return found, [ids[~np.isin(ids, gone)] for ids, gone in zip(narrow, moved, strict=True)]

    def _pool(self, samples: Ints) -> Pool:
        sizes, budgets = self.limits(samples)
        short = np.flatnonzero((SHORT * sizes <= budgets).all(axis=1))
        short = np.random.default_rng((self.seed, 3)).permutation(short)
        ids = samples[short]
        seconds = self.costs.of_samples(self.corpus.sizes.take(ids), self.options.one_sum).sum(axis=1)
        return Pool(ids, sizes[short], seconds)

    def _iterations_of_width(
        self, width: int, packs: PackList, of: Ints, pools: list[Pool], first: int
    ) -> SlottedPacks:
        """Group packs of one width into iterations and fill them with short samples; `of`: each pack's pool, [P].

        The last iteration is completed with packs of short samples alone. Slots number packs from `first` on.
        """
        teams = self.options.data_parallel_size // width
        size, count = teams * self.options.micro_batches, len(packs)
        missing, most = -count % size, int(np.argmax([len(pool.left) for pool in pools]))
        held, budgets = self.limits(packs.sample_ids)
        held = np.add.reduceat(held, packs.pack_offsets[:-1])
        room = np.concatenate([width * budgets - held, np.tile(width * budgets, (missing, 1))])
        seconds = width * self.seconds(packs, np.full(count, width)).sum(axis=1)
        seconds, of = np.append(seconds, np.zeros(missing)), np.append(of, np.full(missing, most))
        rows, got = fill_groups(seconds, room, pools, of, size)
        ids = [packs.sample_ids[a:b].tolist() for a, b in pairwise(packs.pack_offsets)] + [[] for _ in range(missing)]
        held_by = [one + more for one, more in zip(ids, got, strict=True)]
        number = np.cumsum([len(samples) > 0 for samples in held_by]) - 1
        number[[len(samples) == 0 for samples in held_by]] = EMPTY_PACK
        filled = PackList.from_lists([samples for samples in held_by if samples])
        widths = np.full(len(filled), width, np.int64)
        totals = self.seconds(filled, widths)
        slots = balance_iterations(totals, number[rows], teams)
        return SlottedPacks(filled, widths, np.repeat(np.where(slots >= 0, slots + first, slots), width, axis=1))

    def narrow(self, exchange_groups: Sequence[Ints]) -> tuple[PackList, Ints]:
        """Pack samples for one rank, each group apart; return the packs and the number of each one's group, [P]."""
        found = []
        for ids in exchange_groups:
            sizes, options = self.corpus.sizes.take(ids), self.options
            packs = pack_balanced(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=self.seed)
            found.append(PackList(packs.pack_offsets, ids[packs.sample_ids]))
        return PackList.concatenate(found), np.repeat(np.arange(len(found)), [len(packs) for packs in found])

    def _wide(self, samples: Ints, of_samples: Ints) -> tuple[PackList, Ints]:
        """Pack the samples of each width above 1 separately; return the packs and their widths, [P]."""
        found, widths = [PackList.concatenate([])], [np.zeros(0, np.int64)]
        for width in self.options.widths:
            ids = samples[of_samples == width]
            if width == 1 or len(ids) == 0:
                continue
            sizes, budgets = self.limits(ids)
            packs = pack_first_fit(sizes, width * budgets, self.seed)
            found.append(PackList(packs.pack_offsets, ids[packs.sample_ids]))
            widths.append(np.full(len(packs), width, np.int64))
        return PackList.concatenate(found), np.concatenate(widths)
