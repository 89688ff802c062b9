"""Sample swaps: budgets and exchange groups hold, ranks wait no longer, iterations look like the corpus."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.corpora import UNTUNED
from benchmarks.packing_grid import sources_of
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.spread import pack_features, spread_against_random
from omnibal_ext.packing.ordering.swap_samples import Samples, swap_samples
from omnibal_ext.packing.pack_epoch import pack_epoch
from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Case(NamedTuple):
    packs: PackList
    samples: Samples  # in the order of sample numbers
    budgets: Ints
    constant: Floats  # [parts] seconds of a pack without samples
    slots: Ints

    def exchanged(self, exchange_groups: Ints, limit: float, seed: int, effort: float) -> PackList:
        ids, (sizes, seconds_each, features, kinds) = self.packs.sample_ids, self.samples
        held = Samples(sizes[ids], seconds_each[ids], features[ids], kinds[ids])
        seconds = added_up(self.packs, self.samples.seconds) + self.constant
        return swap_samples(self.packs, held, self.budgets, seconds, exchange_groups, self.slots, limit, seed, effort)

    def waits(self, packs: PackList) -> float:
        return wait(rank_loads(self.slots, added_up(packs, self.samples.seconds) + self.constant))

    def squares(self, packs: PackList) -> float:
        """What is to be small: squares of features, and kinds that miss."""
        features = added_up(packs, self.samples.features)
        deviations = features - features.mean(axis=0)
        kinds = added_up(packs, self.samples.kinds.astype(np.float64))
        batch = self.slots[0].size
        return float(
            (deviations[self.slots].sum(axis=(1, 2)) ** 2).sum()
            + batch * (kinds[self.slots].sum(axis=(1, 2)) == 0).sum()
        )


def added_up(packs: PackList, values: Floats) -> Floats:
    return np.stack([values[packs.sample_ids[a:b]].sum(axis=0) for a, b in pairwise(packs.pack_offsets)])


def a_case(generator: np.random.Generator, shape: tuple[int, int, int], room: int, parts: int) -> Case:
    counts = generator.integers(1, 6, int(np.prod(shape)))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    samples = int(offsets[-1])
    packs = PackList(offsets, generator.permutation(samples))
    sizes = generator.integers(1, 9, (samples, 2))
    features = np.column_stack([sizes, generator.normal(size=samples)])
    features /= np.maximum(1e-3, added_up(packs, features).std(axis=0))
    kinds = generator.random((samples, 2)) < [0.3, 0.1]
    seconds = sizes @ generator.uniform(0.1, 1, (2, parts))
    loads = added_up(packs, sizes.astype(np.float64)).astype(np.int64)
    slots = generator.permutation(len(packs)).reshape(shape)
    return Case(packs, Samples(sizes, seconds, features, kinds), loads.max(axis=0) + room, np.ones(parts), slots)


@given(
    st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3)),
    st.integers(0, 6),
    st.integers(1, 2),
    st.sampled_from([0.003, 0.1, 0.3]),
    st.integers(0, 999),
)
def test_exchanges_keep_packs_budgets_and_exchange_groups_and_wait_no_longer_than_the_limit(
    shape: tuple[int, int, int], room: int, parts: int, limit: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    case = a_case(generator, shape, room, parts)
    exchange_groups = generator.integers(0, 2, len(case.packs))
    after = case.exchanged(exchange_groups, limit, seed, 1.0)
    assert len(after) == len(case.packs)
    assert after.counts.min() > 0
    for number in range(2):
        held, had = (
            packs.sample_ids[np.repeat(exchange_groups, packs.counts) == number] for packs in (after, case.packs)
        )
        assert np.array_equal(np.sort(held), np.sort(had))
    assert (added_up(after, case.samples.sizes.astype(np.float64)) <= case.budgets).all()
    before = case.waits(case.packs)
    assert case.waits(after) <= max(limit, before) + 1e-9
    if case.waits(after) >= before - 1e-12:
        assert case.squares(after) <= case.squares(case.packs) + 1e-6
    again = case.exchanged(exchange_groups, limit, seed, 1.0)
    assert np.array_equal(after.sample_ids, again.sample_ids)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(5, 2, 1), (4, 2, 2), (3, 3, 2)])
def test_in_the_end_no_exchange_and_no_move_is_left_to_make(shape: tuple[int, int, int], seed: int) -> None:
    case = a_case(np.random.default_rng(seed), shape, 2, 1)
    limit, exchange_groups = 0.25, np.zeros(len(case.packs), np.int64)
    after = case.exchanged(exchange_groups, limit, seed, 60.0)
    assert case.squares(after) < 0.5 * case.squares(case.packs)
    left, owners = case.squares(after), np.repeat(np.arange(len(after)), after.counts)
    for owners_then in others(owners, len(after)):
        packs = PackList(offsets_of(np.bincount(owners_then)), after.sample_ids[np.argsort(owners_then, kind="stable")])
        fits = (added_up(packs, case.samples.sizes.astype(np.float64)) <= case.budgets).all()
        if fits and case.waits(packs) <= min(limit, case.waits(after)):
            assert case.squares(packs) >= left - 1e-3


def others(owners: Ints, packs: int) -> Iterator[Ints]:
    """Owners of samples after each exchange of two that is possible, and each move that leaves no pack empty."""
    for one, here in enumerate(owners.tolist()):
        for two in np.flatnonzero(owners > here).tolist():
            exchanged = owners.copy()
            exchanged[[one, two]] = owners[[two, one]]
            yield exchanged
        for there in range(packs) if np.count_nonzero(owners == here) > 1 else ():
            moved = owners.copy()
            moved[one] = there
            yield moved


@pytest.mark.parametrize("seed", range(3))
def test_packs_that_lack_something_come_to_lack_the_same(seed: int) -> None:
    """Of 400 packs with room for ten samples 30 lack up to eight; no samples differ, so none can go for another."""
    generator = np.random.default_rng(seed)
    counts = np.full(400, 10)
    counts[:30] -= generator.integers(1, 9, 30)
    packs, one_each = PackList(offsets_of(counts), np.arange(counts.sum())), np.ones((counts.sum(), 1))
    samples = Samples(one_each.astype(np.int64), one_each / 1e4, one_each, np.zeros((len(one_each), 0), np.bool_))
    case = Case(packs, samples, np.array([10]), np.ones(1), generator.permutation(400).reshape(50, 8, 1))
    after = case.exchanged(np.zeros(400, np.int64), 0.003, seed, 1.0)
    held = after.counts[case.slots].sum(axis=(1, 2))
    assert held.max() - held.min() <= 1


@pytest.mark.parametrize("seed", range(3))
def test_samples_of_equal_cost_spread_sources_that_packs_cannot(seed: int) -> None:
    """Dear packs hold one source, nearly, and cheap ones the other: packs have no choice, samples of one size have."""
    generator = np.random.default_rng(seed)
    dear = np.repeat([0, 1], 800)
    source = np.where(generator.random(1600) < 0.1, 1 - dear, dear)
    tokens = np.where(generator.random(1600) < 0.5, 10, 10 + dear)
    packs = PackList(np.arange(0, 1601, 4), np.arange(1600))
    sizes = tokens[:, None].astype(np.int64)
    kinds = np.stack([source == 0, source == 1], axis=1)
    features = np.column_stack([tokens, source - source.mean()]).astype(np.float64)
    features /= added_up(packs, features).std(axis=0)
    samples = Samples(sizes, tokens[:, None] / 10.0, features, kinds)
    loads = added_up(packs, sizes.astype(np.float64))
    slots = np.argsort(loads[:, 0], kind="stable").reshape(50, 8, 1)
    case = Case(packs, samples, np.array([44]), np.zeros(1), slots)
    after = case.exchanged(np.zeros(400, np.int64), 0.003, seed, 1.0)

    def shares(packs: PackList) -> Floats:
        return added_up(packs, source[:, None].astype(np.float64))[slots].sum(axis=(1, 2, 3))

    assert shares(after).std() < shares(case.packs).std() / 4
    assert case.waits(after) <= max(0.003, case.waits(packs))


def test_an_iteration_that_misses_a_kind_gets_a_sample_of_it() -> None:
    """Thirty samples of a kind in fifteen iterations of thirty: all have one then."""
    packs = PackList(np.arange(0, 61, 2), np.arange(60))
    kinds = np.zeros((60, 1), np.bool_)
    kinds[:30] = True
    samples = Samples(np.ones((60, 1), np.int64), np.ones((60, 1)), np.zeros((60, 1)), kinds)
    slots = np.arange(30).reshape(30, 1, 1)
    after = Case(packs, samples, np.array([2]), np.zeros(1), slots).exchanged(np.zeros(30, np.int64), 0.003, 0, 1.0)
    assert added_up(after, kinds.astype(np.float64)).tolist() == [[1.0]] * 30


def test_nothing_moves_without_time_or_where_nothing_costs() -> None:
    case = a_case(np.random.default_rng(0), (4, 2, 1), 4, 1)
    exchange_groups = np.zeros(len(case.packs), np.int64)
    assert np.array_equal(case.exchanged(exchange_groups, 0.1, 0, 0.0).sample_ids, case.packs.sample_ids)
    free = case._replace(samples=case.samples._replace(seconds=0 * case.samples.seconds), constant=np.zeros(1))
    assert np.array_equal(free.exchanged(exchange_groups, 0.1, 0, 1.0).sample_ids, case.packs.sample_ids)


@pytest.mark.parametrize("seed", range(2))
def test_an_epoch_spreads_sources_whose_packs_cost_different(seed: int) -> None:
    """Two sizes of sample in three sources: orders of packs spread sources 1.2 times as much as chance does."""
    make, budgets = UNTUNED["two points"]
    corpus = Corpus(*sources_of(make(4_000)))
    options = PackOptions(vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=8, seed=seed)
    epoch = pack_epoch(corpus, np.zeros(4_000, np.int8), options, PackCosts.of_model(), 0)
    features = pack_features(corpus, epoch.packs, epoch.loads)
    iterations = np.arange(epoch.groups[0] * 8).reshape(-1, 8)
    assert spread_against_random(iterations, features.values)[-3:].max() < 0.4


@pytest.mark.parametrize("seed", range(2))
def test_copies_of_a_sample_and_groups_share_no_pack(seed: int) -> None:
    """Every sample four times in an epoch of one part; two groups that may not share packs."""
    generator = np.random.default_rng(seed)
    sizes = Sizes.from_arrays(generator.integers(0, 3, 200), generator.integers(50, 120, 200))
    groups = generator.integers(0, 2, 200)
    corpus = Corpus(sizes, (CorpusSource("all", 200, 4.0),), groups)
    options = PackOptions(vit_budget=12, llm_budget=600, data_parallel_size=4, micro_batches=12, seed=seed)
    packs = pack_epoch(corpus, np.zeros(200, np.int8), options, PackCosts.of_model(), 0).packs
    assert np.array_equal(np.bincount(packs.sample_ids), np.full(200, 4))
    for first, end in pairwise(packs.pack_offsets):
        held = packs.sample_ids[first:end]
        assert len(np.unique(held)) == len(held)
        assert len(np.unique(groups[held])) == 1


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 4), st.integers(0, 99))
def test_no_iteration_comes_to_miss_a_kind(iterations: int, ranks: int, room: int, seed: int) -> None:
    case = a_case(np.random.default_rng(seed), (iterations, ranks, 1), room, 1)
    after = case.exchanged(np.zeros(len(case.packs), np.int64), 0.05, seed, 1.0)
    held, had = (added_up(packs, case.samples.kinds)[case.slots].sum(axis=(1, 2)) for packs in (after, case.packs))
    assert not ((held == 0) & (had > 0)).any()


@pytest.mark.parametrize("seed", range(3))
def test_the_price_of_waiting_stays_until_no_more_is_waited_than_may_be(seed: int) -> None:
    """A pack of long samples stands in each of 40 iterations, as if brought: in little time these go elsewhere.

    Lengths are the feature too. At a price that falls in any case they are waited for longer, by an eighth to a half.
    """
    generator = np.random.default_rng(seed)
    lengths = generator.integers(80, 120, 4_000)
    lengths[:400] = generator.integers(100, 120, 400)
    packs, seconds = PackList(np.arange(0, 4_001, 10), np.arange(4_000)), lengths[:, None] / 1e3
    samples = Samples(lengths[:, None], seconds, seconds / 0.004, np.zeros((4_000, 0), np.bool_))
    others = 40 + np.argsort(added_up(packs, seconds)[40:, 0])
    slots = np.column_stack([np.arange(40), others[:280].reshape(40, 7)]).ravel()
    slots = np.concatenate([slots, others[280:]]).reshape(50, 8, 1)
    case = Case(packs, samples, np.array([1_300]), np.zeros(1), slots)
    limit = 0.3 * case.waits(packs)
    assert case.waits(case.exchanged(np.zeros(400, np.int64), limit, seed, 0.1)) <= limit


def test_of_many_sources_the_largest_in_an_epoch_are_spread() -> None:
    """By their samples times their weights: two small ones that are seen often are among the eight."""
    sizes = Sizes.from_arrays(np.ones(120, int), np.full(120, 10))
    often = {3: 5.0, 7: 4.0}
    counts = [12, 11, 11, 4, 12, 12, 11, 4, 11, 11, 11, 10]
    corpus = Corpus(sizes, tuple(CorpusSource(f"s{n}", count, often.get(n, 1.0)) for n, count in enumerate(counts)))
    packs = PackList(np.arange(0, 121, 4), np.arange(120))
    found = pack_features(corpus, packs, np.ones((30, 3), np.int64))
    largest = sorted(range(12), key=lambda n: (-counts[n] * often.get(n, 1.0), n))[:8]
    assert {3, 7} <= set(largest)
    numbers = corpus.source_numbers().reshape(30, 4)
    assert found.has.T.tolist() == [(numbers == n).any(axis=1).tolist() for n in sorted(largest)]
