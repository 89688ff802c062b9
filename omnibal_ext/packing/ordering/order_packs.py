"""Order the packs of a corpus, or of a sub-epoch: equal packs, balanced ranks, iterations that look like the corpus."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.assign_ranks import assign_balanced, assign_zigzag, stored_order
from omnibal_ext.packing.ordering.balance_ranks import balance_ranks, split_leftover
from omnibal_ext.packing.ordering.equalize_packs import equalize_packs, worth_equalizing
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.order_iterations import order_iterations
from omnibal_ext.packing.ordering.spread import Features, pack_features
from omnibal_ext.packing.ordering.swap_samples import Samples, swap_samples, worth_swapping
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads, sample_loads

SPENT = 0.96  # of the allowed wait, as the last iteration's is only estimated
PACK_EFFORT = 0.5  # of the effort, for packs; the rest for ranks that run several
CHUNK = 1 << 16  # packs ordered together: few enough for a processor's cache


def order_packs(
    corpus: Corpus,
    built: PackList,
    options: PackOptions,
    costs: PackCosts,
    seed: int,
    exchange_groups: Ints | None = None,
    others: PackList | None = None,
) -> PackList:
    """Return packs in the order of iterations, leftover packs last.

    1. Equalize the seconds of packs, then of ranks where each runs several packs an iteration.
    2. Order packs so that ranks wait at most the fraction `options.wait` and iterations look like the corpus; many
       packs in random chunks.
    3. Swap samples between iterations where both then look more like the corpus.

    Features are divided by their standard deviation over the packs as built, so that all weigh alike.

    Args:
        exchange_groups: number of each pack, ascending, [P]; only packs of equal number exchange samples. None: all do.
        others: packs of another sub-epoch. Packs that share a sample with them become leftover only if other
            packs do not suffice.
    """
    exchange_groups = np.zeros(len(built), np.int64) if exchange_groups is None else exchange_groups
    ordering, effort = _Ordering(corpus, options, costs, seed), options.seconds
    several = options.micro_batches > 1 and options.data_parallel_size > 1  # a single rank never waits
    before = ordering.loads(built)
    packs, loads = ordering.equalize(
        built, before, exchange_groups, np.arange(len(built)), PACK_EFFORT if several else 1.0
    )
    seconds = ordering.seconds(loads)
    leftover, running = split_leftover(seconds, len(packs) % options.global_batch, _repeats_sample_of(packs, others))
    if len(running) == 0:
        return packs.reordered(leftover)
    chunks = _chunks(running, options.global_batch, seed)
    effort /= len(chunks)
    packs_of_ranks = [chunk[balance_ranks(seconds[chunk], options.micro_batches, seed, effort)] for chunk in chunks]
    if several:
        rank_of = np.full(len(packs), -1, np.int64)
        rank_of[np.concatenate(packs_of_ranks)] = np.arange(len(running) // options.micro_batches)[:, None]
        packs, loads = ordering.equalize(packs, loads, exchange_groups, rank_of, 1 - PACK_EFFORT)
        seconds = ordering.seconds(loads)
    deviations = ordering.features(built, before).deviations()
    features = ordering.features(packs, loads).scaled(deviations)
    limit = _limit_of_wait(seconds, leftover, running, options)
    slots = []
    for chunk in packs_of_ranks:
        numbers, ranks = chunk.ravel(), np.arange(chunk.size).reshape(chunk.shape)
        arguments = options.data_parallel_size, limit, seed, effort
        slots.append(numbers[order_iterations(seconds[numbers], features[numbers], ranks, *arguments)])
    order = np.concatenate([stored_order(np.concatenate(slots)).ravel(), leftover])
    return ordering.swapped(packs.reordered(order), exchange_groups[order], deviations, limit)


@dataclass(frozen=True)
class _Ordering:
    """Inputs of an ordering, and values derived from them, cached."""

    corpus: Corpus
    options: PackOptions
    costs: PackCosts
    seed: int

    @cached_property
    def budgeted(self) -> tuple[Ints, Ints]:
        """The sizes of samples that have a budget, [N, K], and the budgets [K]."""
        sizes, options = self.corpus.sizes, self.options
        limits = {name: budget for name, budget in options.budgets.items() if budget}
        columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in limits)]
        return np.column_stack(columns), np.array([options.vit_budget, options.llm_budget, *limits.values()])

    @cached_property
    def of_samples(self) -> Floats:
        """Seconds that each sample adds to its pack, [N, parts]."""
        return self.costs.of_samples(self.corpus.sizes, self.options.one_sum)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loads of a pack."""
        return (*LOADS, *self.corpus.sizes.more)

    def loads(self, packs: PackList) -> Ints:
        """Loads of packs, [P, K]."""
        return pack_loads(packs, self.corpus.sizes)

    def seconds(self, loads: Ints) -> Floats:
        """Seconds of packs in the parts of the model that ranks wait for, [P, parts]."""
        return self.costs.waited_for(loads, self.names, self.options.one_sum)

    def features(self, packs: PackList, loads: Ints) -> Features:
        """Features of packs that should be equal over iterations."""
        return pack_features(self.corpus, packs, loads)

    def equalize(
        self, packs: PackList, loads: Ints, exchange_groups: Ints, ranks: Ints, fraction: float
    ) -> tuple[PackList, Ints]:
        """Equalize ranks with a fraction of the effort; `ranks` [P] is each pack's rank."""
        effort = fraction * self.options.seconds
        if not worth_equalizing(packs, effort):
            return packs, loads
        equalized = equalize_packs(packs, *self.budgeted, self.of_samples, ranks, exchange_groups, self.seed, effort)
        return equalized, self.loads(equalized)

    def swapped(self, packs: PackList, exchange_groups: Ints, deviations: Floats, limit: float) -> PackList:
        """Swap samples between the packs of complete iterations; leftover packs come last, unchanged."""
        complete = len(packs) // self.options.global_batch * self.options.global_batch
        running, last = packs.between(0, complete), packs.between(complete, len(packs))
        if not worth_swapping(len(running.sample_ids), self.options.seconds):
            return packs
        groups = np.arange(complete).reshape(-1, self.options.global_batch)
        slots = assign_zigzag(groups, self.options.data_parallel_size)
        samples, limits = self._samples(running, packs.sample_ids, deviations), self.budgeted[1]
        arguments = exchange_groups[:complete], slots, limit, self.seed, self.options.seconds
        swapped = swap_samples(running, samples, limits, self.seconds(self.loads(running)), *arguments)
        return PackList.concatenate([swapped, last])

    def _samples(self, running: PackList, ids: Ints, deviations: Floats) -> Samples:
        """Return what each sample in `running` packs adds to its pack; features are relative to all `ids`."""
        alone = PackList(np.arange(len(ids) + 1), ids)
        each = self.features(alone, sample_loads(self.corpus.sizes.take(ids)))
        deviations, held = deviations[: each.values.shape[1]], slice(0, len(running.sample_ids))
        features = np.ascontiguousarray(each.values[held][:, deviations > 0] / deviations[deviations > 0])
        ids = running.sample_ids
        return Samples(self.budgeted[0][ids], self.of_samples[ids], features, each.has[held])


def _chunks(packs: Ints, global_batch: int, seed: int) -> list[Ints]:
    """Return all packs, or random chunks of complete iterations of about `CHUNK` packs."""
    count = -(-len(packs) // CHUNK)
    if count == 1:
        return [packs]
    iterations = np.random.default_rng((seed, 3)).permutation(packs).reshape(-1, global_batch)
    return [np.sort(chunk, axis=None) for chunk in np.array_split(iterations, min(count, len(iterations)))]


def _limit_of_wait(seconds: Floats, leftover: Ints, running: Ints, options: PackOptions) -> float:
    """Return the fraction that complete iterations may wait, reduced by the expected wait of the last iteration.

    That is estimated for ranks with one pack from each M-quantile of cost. At most half of the allowed wait is
    deducted.
    """
    may, micro_batches = SPENT * options.wait, options.micro_batches
    missing = options.global_batch - len(leftover)
    if len(leftover) == 0 or options.last_iteration == "empty":
        return may
    by_cost = running[np.argsort(seconds[running].sum(axis=1), kind="stable")]
    turns = np.arange(missing)
    middles = (2 * (turns % micro_batches) + 1) * len(running) // (2 * micro_batches)
    others = by_cost[np.minimum(middles + turns // micro_batches, len(running) - 1)]
    last = assign_balanced(seconds, np.concatenate([leftover, others])[None], options.data_parallel_size)
    beyond = wait(rank_loads(last, seconds)) - may
    return may - min(max(0.0, beyond / (len(running) // options.global_batch)), may / 2)


def _repeats_sample_of(packs: PackList, others: PackList | None) -> NDArray[np.bool_] | None:
    """Return which packs share a sample with `others`, [P]; None without others."""
    if others is None or len(others) == 0:
        return None
    return np.logical_or.reduceat(np.isin(packs.sample_ids, others.sample_ids), packs.pack_offsets[:-1])
