"""Packs of a corpus, or of a part of it, as they run: even packs, level ranks, iterations that look like the corpus."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.deal_to_ranks import deal, deal_level, stored_order
from omnibal_ext.packing.ordering.even_packs import even_packs, worth_evening
from omnibal_ext.packing.ordering.level_ranks import level_ranks, set_aside
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.order_iterations import order_iterations
from omnibal_ext.packing.ordering.spread import Features, pack_features
from omnibal_ext.packing.ordering.swap_samples import Samples, swap_samples, worth_swapping
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads, sample_loads

SPENT = 0.96  # of what may be waited: what the last iteration of an epoch waits is an estimate
OF_PACKS = 0.5  # share of the time for evening, where ranks run several
TOGETHER = 1 << 16  # packs that are ordered together: what swaps look up stays in a processor's cache then


def ordered(
    corpus: Corpus,
    found: Packs,
    options: PackOptions,
    costs: PackCosts,
    seed: int,
    kin: Ints | None = None,
    others: Packs | None = None,
) -> Packs:
    """Return packs by iteration, those that fill none last.

    1. Let packs cost the same; then ranks, where several run several packs each in an iteration.
    2. Order them, so that ranks wait for no more than `options.wait` and iterations look like the corpus; where they
       are many, random parts apart.
    3. Let samples change iterations, one for one, where these look more like it then.

    What packs as found differ by is what counts as much in each feature.

    Args:
        kin: number of each pack, ascending; only packs of the same number exchange samples, [P]. Without, all do.
        others: packs that the same samples are in; packs that hold one are not left for last, if the others suffice.
    """
    kin = np.zeros(len(found), np.int64) if kin is None else kin
    part, effort = _Part(corpus, options, costs, seed), options.seconds
    several = options.micro_batches > 1 and options.data_parallel_size > 1  # one rank alone waits for nobody
    before = part.loads(found)
    packs, loads = part.even(found, before, kin, np.arange(len(found)), OF_PACKS if several else 1.0)
    seconds = part.seconds(loads)
    aside, run = set_aside(seconds, len(packs) % options.global_batch, _holds(packs, others))
    if len(run) == 0:
        return packs.reordered(aside)
    parts = _parts(run, options.global_batch, seed)
    teams = [own[level_ranks(seconds[own], options.micro_batches, seed, effort / len(parts))] for own in parts]
    if several:
        runs_on = np.full(len(packs), -1, np.int64)
        runs_on[np.concatenate(teams)] = np.arange(len(run) // options.micro_batches)[:, None]
        packs, loads = part.even(packs, loads, kin, runs_on, 1 - OF_PACKS)
        seconds = part.seconds(loads)
    deviations = part.features(found, before).deviations()
    features = part.features(packs, loads).scaled(deviations)
    limit = _left_to_wait(seconds, aside, run, options)
    dealt = []
    for team in teams:
        own, ranks = team.ravel(), np.arange(team.size).reshape(team.shape)
        given = options.data_parallel_size, limit, seed, effort / len(parts)
        dealt.append(own[order_iterations(seconds[own], features[own], ranks, *given)])
    order = np.concatenate([stored_order(np.concatenate(dealt)).ravel(), aside])
    return part.swapped(packs.reordered(order), kin[order], deviations, limit)


@dataclass(frozen=True)
class _Part:
    """What packs are made of and for; what takes a pass over all samples is read once, and only if it is needed."""

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
        """Sizes of a pack."""
        return (*LOADS, *self.corpus.sizes.more)

    def loads(self, packs: Packs) -> Ints:
        """Sizes of packs, [P, K]."""
        return pack_loads(packs, self.corpus.sizes)

    def seconds(self, loads: Ints) -> Floats:
        """Seconds of packs in the parts that ranks wait for, [P, parts]."""
        return self.costs.waited_for(loads, self.names, self.options.one_sum)

    def features(self, packs: Packs, loads: Ints) -> Features:
        """What iterations should have as much of as others."""
        return pack_features(self.corpus, packs, loads, self.names)

    def even(self, packs: Packs, loads: Ints, kin: Ints, ranks: Ints, share: float) -> tuple[Packs, Ints]:
        """Let ranks cost as much as each other, in a share of the time for it; `ranks` [P] run the packs."""
        effort = share * self.options.seconds
        if not worth_evening(packs, effort):
            return packs, loads
        evened = even_packs(packs, *self.budgeted, self.of_samples, ranks, kin, self.seed, effort)
        return evened, self.loads(evened)

    def swapped(self, packs: Packs, kin: Ints, deviations: Floats, limit: float) -> Packs:
        """Let samples change places between packs that fill iterations as they stand; the last ones may fill none."""
        whole = len(packs) // self.options.global_batch * self.options.global_batch
        run, last = packs.part(0, whole), packs.part(whole, len(packs))
        if not worth_swapping(len(run.sample_ids), self.options.seconds):
            return packs
        dealt = deal(np.arange(whole).reshape(-1, self.options.global_batch), self.options.data_parallel_size)
        samples, limits = self._samples(run, packs.sample_ids, deviations), self.budgeted[1]
        given = kin[:whole], dealt, limit, self.seed, self.options.seconds
        return Packs.concatenate([swap_samples(run, samples, limits, self.seconds(self.loads(run)), *given), last])

    def _samples(self, run: Packs, ids: Ints, deviations: Floats) -> Samples:
        """Return what each sample of the packs that run adds to its pack; features are those of all `ids`."""
        alone = Packs(np.arange(len(ids) + 1), ids)
        each = self.features(alone, sample_loads(self.corpus.sizes.take(ids)))
        deviations, held = deviations[: each.values.shape[1]], slice(0, len(run.sample_ids))
        features = np.ascontiguousarray(each.values[held][:, deviations > 0] / deviations[deviations > 0])
        own = run.sample_ids
        return Samples(self.budgeted[0][own], self.of_samples[own], features, each.has[held])


def _parts(packs: Ints, global_batch: int, seed: int) -> list[Ints]:
    """Return all packs, or, where they are many, random parts of as many iterations, of `TOGETHER` packs or less."""
    count = -(-len(packs) // TOGETHER)
    if count == 1:
        return [packs]
    iterations = np.random.default_rng((seed, 3)).permutation(packs).reshape(-1, global_batch)
    return [np.sort(part, axis=None) for part in np.array_split(iterations, min(count, len(iterations)))]


def _left_to_wait(seconds: Floats, aside: Ints, run: Ints, options: PackOptions) -> float:
    """Return what whole iterations may wait, so that the epoch's last one, of the packs set aside, is paid for as well.

    It is filled with packs of one of these iterations, of which each rank has M that make up for each other: here as
    many of each of M stretches of an order of cost, which is about what it will be. Half of what may be waited is left.
    """
    may, micro_batches = SPENT * options.wait, options.micro_batches
    missing = options.global_batch - len(aside)
    if len(aside) == 0 or options.last_iteration == "empty":
        return may
    by_cost = run[np.argsort(seconds[run].sum(axis=1), kind="stable")]
    turns = np.arange(missing)
    middles = (2 * (turns % micro_batches) + 1) * len(run) // (2 * micro_batches)
    others = by_cost[np.minimum(middles + turns // micro_batches, len(run) - 1)]
    last = deal_level(seconds, np.concatenate([aside, others])[None], options.data_parallel_size)
    beyond = wait(rank_loads(last, seconds)) - may
    return may - min(max(0.0, beyond / (len(run) // options.global_batch)), may / 2)


def _holds(packs: Packs, others: Packs | None) -> NDArray[np.bool_] | None:
    """Return which packs hold a sample of some others, if there are others."""
    if others is None or len(others) == 0:
        return None
    return np.logical_or.reduceat(np.isin(packs.sample_ids, others.sample_ids), packs.pack_offsets[:-1])
