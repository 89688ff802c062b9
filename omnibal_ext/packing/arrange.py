"""Packs of a corpus, or of a part of it, as they run: even ranks, iterations that teach, samples that change places."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.deal import deal, stored_order
from omnibal_ext.packing.even import even_packs, worth_evening
from omnibal_ext.packing.exchange import Samples, exchange_samples, worth_exchanging
from omnibal_ext.packing.kinds import bring_kinds
from omnibal_ext.packing.level import WAIT_ENOUGH, WAIT_TO_SPEND, order_packs
from omnibal_ext.packing.metrics import rank_loads, wait
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads
from omnibal_ext.packing.ranks import level_ranks, set_aside
from omnibal_ext.packing.teach import Features, pack_features

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SHARES = 0.5, 1.0  # of iterations that miss a kind, to which packs come at a time
OF_PACKS = 0.5  # share of the time for evening, where ranks run several


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
    2. Order them, so that iterations teach as well as those of the packs that were found, in a random order.
    3. Let samples change iterations, one for one, where these teach better then; packs too, where a kind is missing.

    What packs as found differ by is what counts as much in each feature.

    Args:
        kin: number of each pack, ascending; only packs of the same number exchange samples, [P]. Without, all do.
        others: packs that the same samples are in; packs that hold one are not left for last, if the others suffice.
    """
    kin = np.zeros(len(found), np.int64) if kin is None else kin
    part, effort = _Part(corpus, options, costs, seed), options.seconds
    several = options.micro_batches > 1 and options.data_parallel_size > 1  # one rank alone waits for nobody
    packs = part.even(found, kin, np.arange(len(found)), OF_PACKS if several else 1.0)
    seconds = part.seconds(packs)
    aside, run = set_aside(seconds, len(packs) % options.global_batch, _holds(packs, others))
    if len(run) == 0:
        return packs.reordered(aside)
    ranks = level_ranks(seconds, run, options.micro_batches, seed, effort)
    if several:
        runs_on = np.full(len(packs), -1, np.int64)
        runs_on[ranks] = np.arange(len(ranks))[:, None]
        packs = part.even(packs, kin, runs_on, 1 - OF_PACKS)
        seconds = part.seconds(packs)
    deviations = part.features(found).deviations()
    features = part.features(packs).scaled(deviations)
    dealt = order_packs(seconds, features, ranks, options.data_parallel_size, seed, effort)
    order = np.concatenate([stored_order(dealt).ravel(), aside])
    return part.exchanged(packs.reordered(order), kin[order], deviations)


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

    def seconds(self, packs: Packs) -> Floats:
        """Seconds of packs in the parts that ranks wait for, [P, parts]."""
        return self.costs.waited_for(pack_loads(packs, self.corpus.sizes), self.names, self.options.one_sum)

    def features(self, packs: Packs) -> Features:
        """What iterations should have as much of as others."""
        return pack_features(self.corpus, packs, pack_loads(packs, self.corpus.sizes), self.names)

    def even(self, packs: Packs, kin: Ints, ranks: Ints, share: float) -> Packs:
        """Let ranks cost as much as each other, in a share of the time for it; `ranks` [P] run the packs."""
        effort = share * self.options.seconds
        if not worth_evening(packs, effort):
            return packs
        return even_packs(packs, *self.budgeted, self.of_samples, ranks, kin, self.seed, effort)

    def exchanged(self, packs: Packs, kin: Ints, deviations: Floats) -> Packs:
        """Let samples change places between packs that fill iterations as they stand; the last ones may fill none.

        Where iterations miss a kind all the same, packs that hold it come, and samples make up for what these cost.
        """
        whole = len(packs) // self.options.global_batch * self.options.global_batch
        run, last, kin = packs.part(0, whole), packs.part(whole, len(packs)), kin[:whole]
        if not worth_exchanging(len(run.sample_ids), self.options.seconds):
            return packs
        dealt = deal(np.arange(whole).reshape(-1, self.options.global_batch), self.options.data_parallel_size)
        numbers, samples = self._samples(packs.sample_ids, deviations)
        run = self._exchange(run, numbers, samples, kin, dealt)
        for share in SHARES:
            seconds = self.seconds(run)
            order = stored_order(bring_kinds(seconds, self.features(run).has, dealt, share)).ravel()
            if np.array_equal(order, np.arange(whole)):
                break
            brought = self._exchange(run.reordered(order), numbers, samples, kin[order], dealt)
            waits, longer = (wait(rank_loads(dealt, each)) for each in (seconds, self.seconds(brought)))
            if longer > max(waits, WAIT_ENOUGH):
                break
            run, kin = brought, kin[order]
        return Packs.concatenate([run, last])

    def _samples(self, ids: Ints, deviations: Floats) -> tuple[Ints, Samples]:
        """Return the numbers of samples, ascending, and what each adds to its pack; features are those of all `ids`."""
        each = self.features(Packs(np.arange(len(ids) + 1), ids))
        deviations = deviations[: each.values.shape[1]]
        numbers, first = np.unique(ids, return_index=True)
        features = np.ascontiguousarray(each.values[first][:, deviations > 0] / deviations[deviations > 0])
        return numbers, Samples(self.budgeted[0][numbers], self.of_samples[numbers], features, each.has[first])

    def _exchange(self, packs: Packs, numbers: Ints, samples: Samples, kin: Ints, dealt: Ints) -> Packs:
        """Let samples of packs, all of which run, change places as they cost and teach."""
        held = np.searchsorted(numbers, packs.sample_ids)
        own = Samples(samples.sizes[held], samples.seconds[held], samples.features[held], samples.kinds[held])
        given = kin, dealt, WAIT_TO_SPEND, self.seed, self.options.seconds
        return exchange_samples(packs, own, self.budgeted[1], self.seconds(packs), *given)


def _holds(packs: Packs, others: Packs | None) -> NDArray[np.bool_] | None:
    """Return which packs hold a sample of some others, if there are others."""
    if others is None or len(others) == 0:
        return None
    return np.logical_or.reduceat(np.isin(packs.sample_ids, others.sample_ids), packs.pack_offsets[:-1])
