"""One part of a corpus with samples longer than a rank's budget: packs of several widths, and the iterations they fill.

Where a rank runs several packs, iterations are fair: each has its share of wide packs (`ordering/fair_seats.py`). Where
that leaves ranks waiting, as with one pack a rank, iterations are alike: of one width, and within it of equal cost.
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
from omnibal_ext.packing.ordering.deal_to_ranks import deal, deal_level
from omnibal_ext.packing.ordering.fair_seats import Narrow, Wide, fair_iterations
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.pipeline import ordered
from omnibal_ext.packing.ordering.seats import EMPTY_SEAT, Seated, deal_all
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.fill_groups import Pool, fill_groups
from omnibal_ext.packing.packers.first_fit import pack_first_fit
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import LOADS, Packs
from omnibal_ext.packing.share_loads import EXCHANGED, share_loads
from omnibal_ext.packing.widths import sample_widths

SHORT = 16
"""Samples that this many times fit a rank fill wide packs: whole on one rank, they leave shares level."""


def seat_part(corpus: Corpus, members: Sequence[Ints], options: PackOptions, costs: PackCosts, seed: int) -> Seated:
    """Pack a part and seat its packs, by the method of `options`; only samples of the same `members` share packs."""
    part = _Part(corpus, options, costs, seed)
    if options.method == "isf":
        return part.naive(members)
    found = []
    if len(members) == 1 and (fair := part.fair(members[0])):
        found.append(fair)
        if part.wait(fair) <= options.wait:
            return fair
    found.append(part.alike(members))
    return min(found, key=part.wait)


def narrow_iterations(
    corpus: Corpus, samples: Ints, apart: Callable[[Ints], Iterable[Ints]], options: PackOptions, costs: PackCosts,
    seed: int,
) -> tuple[Seated, Ints]:  # fmt: skip
    """Fill `options.narrow_first` iterations with samples that fit one rank, drawn at random; also return all others.

    A curriculum in packing: HBP (arXiv 2503.07680) trains its first 500 steps on the shortest level alone.

    Args:
        samples: those of a part, ascending [n].
        apart: yields those that may share packs.

    Raises:
        UserError: there are too few such samples.
    """
    part, iterations = _Part(corpus, options, costs, seed), options.narrow_first
    narrow = part.widths(samples) == 1
    drawn = np.random.default_rng((seed, 4)).permutation(samples[narrow])
    sizes, budgets = part.limits(drawn)
    packs_of = np.append(0, (np.cumsum(sizes, axis=0) / np.maximum(budgets, 1)).max(axis=1))  # of so many, and no fewer
    if packs_of[-1] < (count := iterations * options.global_batch):
        most = int(packs_of[-1]) // options.global_batch
        raise UserError(
            f"--narrow-first {iterations}: samples of one rank fill {most} iterations of {options.global_batch} packs "
            "for sure; give as many or fewer"
        )
    enough = int(np.searchsorted(packs_of, count))
    packs, kin = part.narrow(list(apart(np.sort(drawn[:enough]))))
    packs = ordered(corpus, packs, replace(options, widths=(1,)), costs, seed, kin)
    groups = np.arange(count).reshape(iterations, options.global_batch)
    left = packs.part(count, len(packs)).sample_ids
    seated = Seated(packs.part(0, count), np.ones(count, np.int64), deal(groups, options.data_parallel_size))
    return seated, np.sort(np.concatenate([samples[~narrow], drawn[enough:], left]))


def seconds_of_shares(packs: Packs, widths: Ints, corpus: Corpus, options: PackOptions, costs: PackCosts) -> Floats:
    """Return the seconds of the fullest share of each pack in the parts that ranks wait for, [P, parts]."""
    names = (*LOADS, *corpus.sizes.more, EXCHANGED)
    return costs.waited_for(share_loads(packs, corpus.sizes, widths), names, options.one_sum)


class _Part(NamedTuple):
    corpus: Corpus
    options: PackOptions
    costs: PackCosts
    seed: int

    def seconds(self, packs: Packs, widths: Ints) -> Floats:
        return seconds_of_shares(packs, widths, self.corpus, self.options, self.costs)

    def wait(self, seated: Seated) -> float:
        return wait(rank_loads(seated.seats, self.seconds(seated.packs, seated.widths)))

    def limits(self, samples: Ints) -> tuple[Ints, Ints]:
        """Sizes of samples that have a budget, [n, K], and the budgets of a rank [K]."""
        sizes, options = self.corpus.sizes.take(samples), self.options
        limited = {name: budget for name, budget in options.budgets.items() if budget}
        columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in limited)]
        return np.column_stack(columns), np.array([options.vit_budget, options.llm_budget, *limited.values()])

    def widths(self, samples: Ints) -> Ints:
        return sample_widths(self.corpus.sizes.take(samples), self.options, self.options.widths)

    def fair(self, samples: Ints) -> Seated | None:
        """Wide packs of what needs them and nothing else, all others beside them."""
        of_samples = self.widths(samples)
        packs, widths = self._wide(samples, of_samples)
        own = samples[of_samples == 1]
        if len(own) == 0 or len(packs) == 0:
            return None
        wide = Wide(packs, widths, self.seconds(packs, widths))
        seconds = self.costs.of_samples(self.corpus.sizes.take(own), self.options.one_sum)
        narrow = Narrow(own, *self.limits(own), seconds)
        ranks = self.options.data_parallel_size, self.options.micro_batches
        found = fair_iterations(wide, narrow, *ranks, self.seed, self.options.seconds)
        if found is None:
            return None
        generator = np.random.default_rng((self.seed, 2))
        return Seated(found.packs, found.widths, generator.permutation(found.seats))

    def alike(self, members: Sequence[Ints]) -> Seated:
        """Iterations of one width: wide packs in groups of equal cost, filled level; then narrow ones as always."""
        data_parallel, micro_batches = self.options.data_parallel_size, self.options.micro_batches
        found, left = self._wide_groups(members)
        narrow, kin = self.narrow(left)
        options = replace(self.options, widths=(1,), wait=self.options.wait / 2)  # wide packs wait as well
        packs = ordered(self.corpus, narrow, options, self.costs, self.seed, kin) if len(narrow) else narrow
        first, whole = sum(len(each.packs) for each in found), len(packs) // options.global_batch * options.global_batch
        groups = first + np.arange(whole).reshape(-1, options.global_batch)
        tables = [*(each.seats for each in found), deal(groups, data_parallel)]
        tables = [table for table in tables if len(table)] or [np.zeros((0, data_parallel, micro_batches), np.int64)]
        seats = np.random.default_rng((self.seed, 2)).permutation(np.concatenate(tables))
        all_packs = [*(each.packs for each in found), packs.part(0, whole)]
        widths = [*(each.widths for each in found), np.ones(whole, np.int64)]
        if whole < len(packs):
            last = self._last(packs.part(whole, len(packs)), len(members) == 1)
            all_packs.append(last.packs)
            widths.append(last.widths)
            seats = np.concatenate([seats, np.where(last.seats >= 0, last.seats + first + whole, -1)])
        return Seated(Packs.concatenate(all_packs), np.concatenate(widths), seats)

    def _last(self, packs: Packs, divide: bool) -> Seated:
        """Seat narrow packs that fill no iteration; with `divide`, their samples are dealt over all ranks anew."""
        widths, ranks = np.ones(len(packs), np.int64), (self.options.data_parallel_size, self.options.micro_batches)
        if divide:
            own = packs.sample_ids
            seconds = self.costs.of_samples(self.corpus.sizes.take(own), self.options.one_sum)
            none = Wide(packs.part(0, 0), widths[:0], np.zeros((0, seconds.shape[1])))
            if found := fair_iterations(
                none, Narrow(own, *self.limits(own), seconds), *ranks, self.seed, self.options.seconds
            ):
                return found
        seconds = self.seconds(packs, widths)
        return Seated(packs, widths, deal_all(np.arange(len(packs)), seconds, widths, *ranks))

    def _wide_groups(self, members: Sequence[Ints]) -> tuple[list[Seated], list[Ints]]:
        """Pack and fill what is wider than a rank; return iterations of each width, and samples left of each member."""
        pools, found, first = [self._pool(own[self.widths(own) == 1]) for own in members], [], 0
        per_member = [self._wide(own, self.widths(own)) for own in members]
        for width in self.options.widths:
            chosen = [packs.reordered(np.flatnonzero(widths == width)) for packs, widths in per_member]
            of = np.repeat(np.arange(len(members)), [len(packs) for packs in chosen])
            if width > 1 and len(of):
                found.append(self._groups(width, Packs.concatenate(chosen), of, pools, first))
                first += len(found[-1].packs)
        taken = [pool.samples[: pool.taken] for pool in pools]
        narrow = [own[self.widths(own) == 1] for own in members]
        return found, [own[~np.isin(own, gone)] for own, gone in zip(narrow, taken, strict=True)]

    def _pool(self, samples: Ints) -> Pool:
        sizes, budgets = self.limits(samples)
        short = np.flatnonzero((SHORT * sizes <= budgets).all(axis=1))
        short = np.random.default_rng((self.seed, 3)).permutation(short)
        own = samples[short]
        seconds = self.costs.of_samples(self.corpus.sizes.take(own), self.options.one_sum).sum(axis=1)
        return Pool(own, sizes[short], seconds)

    def _groups(self, width: int, packs: Packs, of: Ints, pools: list[Pool], first: int) -> Seated:
        """Fill packs of one width in groups, with packs of short samples alone up to the last whole group."""
        teams = self.options.data_parallel_size // width
        size, count = teams * self.options.micro_batches, len(packs)
        missing, most = -count % size, int(np.argmax([len(pool.left) for pool in pools]))
        held, budgets = self.limits(packs.sample_ids)
        held = np.add.reduceat(held, packs.pack_offsets[:-1])
        room = np.concatenate([width * budgets - held, np.tile(width * budgets, (missing, 1))])
        seconds = width * self.seconds(packs, np.full(count, width)).sum(axis=1)
        seconds, of = np.append(seconds, np.zeros(missing)), np.append(of, np.full(missing, most))
        rows, got = fill_groups(seconds, room, pools, of, size)
        own = [packs.sample_ids[a:b].tolist() for a, b in pairwise(packs.pack_offsets)] + [[] for _ in range(missing)]
        held_by = [one + more for one, more in zip(own, got, strict=True)]
        number = np.cumsum([len(samples) > 0 for samples in held_by]) - 1
        number[[len(samples) == 0 for samples in held_by]] = EMPTY_SEAT
        filled = Packs.of_lists([samples for samples in held_by if samples])
        widths = np.full(len(filled), width, np.int64)
        totals = self.seconds(filled, widths)
        dealt = deal_level(totals, number[rows], teams)
        return Seated(filled, widths, np.repeat(np.where(dealt >= 0, dealt + first, dealt), width, axis=1))

    def narrow(self, members: Sequence[Ints]) -> tuple[Packs, Ints]:
        """Pack what is left of each member; return the packs and their kin [P]."""
        found = []
        for own in members:
            sizes, options = self.corpus.sizes.take(own), self.options
            packs = pack_balanced(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=self.seed)
            found.append(Packs(packs.pack_offsets, own[packs.sample_ids]))
        return Packs.concatenate(found), np.repeat(np.arange(len(found)), [len(packs) for packs in found])

    def naive(self, members: Sequence[Ints]) -> Seated:
        """Packs of one width by ISF, in random order."""
        (width,), found = self.options.widths, []
        for own in members:
            budgets = width * self.options.vit_budget, width * self.options.llm_budget
            packs = pack_isf(self.corpus.sizes.take(own), *budgets, seed=self.seed)
            found.append(Packs(packs.pack_offsets, own[packs.sample_ids]))
        packs = Packs.concatenate(found)
        teams, micro_batches = self.options.data_parallel_size // width, self.options.micro_batches
        order = np.random.default_rng((self.seed, 1)).permutation(len(packs))
        order = np.append(order, np.full(-len(order) % (teams * micro_batches), -1))
        return Seated(
            packs,
            np.full(len(packs), width, np.int64),
            np.repeat(deal(order.reshape(-1, teams * micro_batches), teams), width, axis=1),
        )

    def _wide(self, samples: Ints, of_samples: Ints) -> tuple[Packs, Ints]:
        """Pack the samples of each width above 1 for themselves."""
        found, widths = [Packs.concatenate([])], [np.zeros(0, np.int64)]
        for width in self.options.widths:
            own = samples[of_samples == width]
            if width == 1 or len(own) == 0:
                continue
            sizes, budgets = self.limits(own)
            packs = pack_first_fit(sizes, width * budgets, self.seed)
            found.append(Packs(packs.pack_offsets, own[packs.sample_ids]))
            widths.append(np.full(len(packs), width, np.int64))
        return Packs.concatenate(found), np.concatenate(widths)
