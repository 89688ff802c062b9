"""The order of packs: no rank waits, and every iteration looks like the corpus."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.corpora import UNTUNED
from benchmarks.packing_grid import sources_of
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import (
    assign_zigzag,
    balance_iterations,
    balance_ranks,
    split_leftover,
    stored_order,
)
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.order_iterations import order_iterations
from omnibal_ext.packing.ordering.order_packs import order_packs
from omnibal_ext.packing.ordering.spread import Features, pack_features
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads
from omnibal_ext.sizes import Sizes
from tests.long import short
from tests.unit.packing.corpora import published_files, spread_against_random

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def packed(sizes: Sizes, sources: list[int], budgets: tuple[int, int]) -> tuple[PackList, Ints, Features]:
    packs = pack_balanced(sizes, *budgets, seed=0)
    loads = pack_loads(packs, sizes)
    corpus = Corpus(sizes, tuple(CorpusSource(str(number), count) for number, count in enumerate(sources)))
    return packs, loads, pack_features(corpus, packs, loads)


def order_of(
    seconds: Floats, features: Floats, data_parallel_size: int, micro_batches: int, seed: int, effort: float = 1.0
) -> Ints:
    """All packs, by iteration; those that fill none last."""
    aside, run = split_leftover(seconds, len(seconds) % (data_parallel_size * micro_batches))
    if len(run) == 0:
        return aside
    ranks = run[balance_ranks(seconds[run], micro_batches, seed, effort)]
    slots = order_iterations(seconds, features, ranks, data_parallel_size, 0.003, seed, effort)
    return np.concatenate([stored_order(slots).ravel(), aside])


def iterations_of(loads: Ints, features: Features, ranks: int, micro: int, model: str) -> tuple[Ints, float]:
    """Whole iterations [I, D, M], and what is waited in them."""
    seconds = PackCosts.of_model(model).waited_for(loads, LOADS, one_sum=micro == 1)
    order = order_of(seconds, features.scaled(features.deviations()), ranks, micro, seed=0)
    assert np.array_equal(np.sort(order), np.arange(len(loads)))
    batch = ranks * micro
    iterations = assign_zigzag(order[: len(order) // batch * batch].reshape(-1, batch), ranks)
    return iterations, wait(rank_loads(iterations, seconds))


@given(st.integers(0, 300), st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
def test_every_pack_is_dispatched_once(packs: int, ranks: int, micro: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    seconds, features = generator.random((packs, 2)), generator.normal(size=(packs, 3))
    order = order_of(seconds, features, ranks, micro, seed, effort=0.01)
    assert np.array_equal(np.sort(order), np.arange(packs))


@pytest.mark.slow
@pytest.mark.parametrize("name", short(("published", "heavy tails", "single tiles", "many images"), ("published",)))
def test_nobody_waits_and_iterations_mix_what_a_random_order_mixes(name: str) -> None:
    model = "internvl-chat-1.5" if name in ("published", "single tiles") else "internvl2.5-8b"
    if name == "published":
        files, budgets = published_files(), (18, 5376)
        sizes, sources = Sizes.load(files), [len(Sizes.load(path)) for path in files]
    else:
        make, budgets = UNTUNED[name]
        sizes, sources = make(12_000), [4_000, 2_000, 6_000]
    _, loads, features = packed(sizes, sources, budgets)
    shares = slice(-len(sources), None)
    for ranks, micro in ((8, 1), (8, 4), (8, 16)):
        iterations, waiting = iterations_of(loads, features, ranks, micro, model)
        assert waiting <= 0.003
        if micro > 1:
            spreads = spread_against_random(iterations.reshape(len(iterations), -1), features.values)
            assert spreads[shares].max() <= 1.1
            assert spreads[2] <= 0.5  # attention


def test_the_spread_of_a_random_order_of_samples_is_one(tmp_path: Path) -> None:
    """Packs of four samples drawn at random, in random order."""
    corpus = Corpus(*sources_of(UNTUNED["single tiles"][0](12_000)))
    options = PackOptions("random", vit_budget=8, llm_budget=4_096, data_parallel_size=4, samples_per_pack=4)
    _, summary = build_index(corpus, tmp_path / "index", options)
    assert summary.spread_sources == pytest.approx(1, abs=0.12)


def test_an_iteration_of_one_microbatch_is_not_of_one_kind() -> None:
    """Half of the packs cost their seconds in tiles, half in tokens: a rank's sum is all that is waited for."""
    loads = np.tile([[8, 100, 1000], [2, 2500, 90_000]], (800, 1))
    costs = PackCosts({"vision": {"tiles": 0.4}, "language": {"tokens": 0.001}})
    features = np.tile([[-1.0], [1.0]], (800, 1))
    order = order_of(costs.waited_for(loads, LOADS, one_sum=True), features, 8, 1, seed=0)
    assert (loads[order, 0].reshape(-1, 8).sum(axis=1) == 4 * 8 + 4 * 2).all()


@pytest.mark.parametrize("seed", range(5))
def test_assignment_balances_both_parts_at_any_data_parallel_size(seed: int) -> None:
    seconds = np.random.default_rng(seed).uniform(0.5, 1.5, (128, 2))
    group = np.arange(128)[None]
    for ranks in (2, 4, 8, 16):
        slots = balance_iterations(seconds, group, ranks)
        assert np.array_equal(np.sort(slots.ravel()), np.arange(128))
        assert wait(rank_loads(slots, seconds)) <= 0.25 * wait(rank_loads(assign_zigzag(group, ranks), seconds))
        assert np.array_equal(assign_zigzag(stored_order(slots), ranks), slots)


@pytest.mark.parametrize("seed", range(2))
def test_packs_change_iterations_one_by_one_where_ranks_run_several(seed: int) -> None:
    """Features of 1,024 packs that have nothing to do with cost; .07 or more if ranks keep their packs."""
    generator = np.random.default_rng(seed)
    seconds, features = generator.normal(1, 0.02, (1024, 2)), generator.normal(size=(1024, 4))
    features -= features.mean(axis=0)
    iterations = assign_zigzag(order_of(seconds, features, 8, 4, seed).reshape(-1, 32), 8)
    assert wait(rank_loads(iterations, seconds)) <= 0.003
    assert spread_against_random(iterations.reshape(-1, 32), features).max() <= 0.04


def test_sizes_weigh_by_how_much_packs_as_built_differ() -> None:
    """Even packs hardly differ in tokens, which would then weigh as much as attention: 1.15 of what chance has."""
    make, budgets = UNTUNED["heavy tails, wide"]
    corpus, costs = Corpus(*sources_of(make(20_000))), PackCosts.of_model("internvl-chat-1.5")
    options = PackOptions(vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=16)
    found = pack_balanced(corpus.sizes, *budgets, seed=0)
    packs = order_packs(corpus, found, options, costs, seed=0)
    loads = pack_loads(packs, corpus.sizes)[: len(packs) // 16 * 16].reshape(-1, 16, 3)
    assert (loads.sum(axis=1).std(axis=0) / pack_loads(found, corpus.sizes).std(axis=0)).max() / 4 <= 1.05


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, with ties broken by position."""
    return float(np.corrcoef(np.argsort(np.argsort(a, kind="stable")), np.argsort(np.argsort(b, kind="stable")))[0, 1])


@pytest.mark.parametrize("seed", range(3))
def test_part_of_an_iteration_is_as_good_a_sample_as_others(seed: int) -> None:
    """An epoch's last iteration has the first packs of a group: they are no dearer, and no richer in anything."""
    generator = np.random.default_rng(seed)
    seconds = generator.normal(1, 0.1, (2_048, 2)).clip(0.5)
    features = (seconds - seconds.mean(axis=0)) / seconds.std(axis=0)
    ranks = balance_ranks(seconds, 8, seed, 0.5)
    slots = order_iterations(seconds, features, ranks, 8, 0.003, seed, 0.5)
    heads = features[stored_order(slots)[:, :16]].sum(axis=1) / np.sqrt(16)
    assert (np.abs(heads.mean(axis=0)) <= 4 / np.sqrt(len(heads))).all()
    assert (heads.std(axis=0) <= 1.5).all()


def test_position_tells_nothing_of_size_or_source() -> None:
    files = published_files()
    counts = [len(Sizes.load(path)) for path in files]
    source, sizes = np.repeat(np.arange(3), counts), Sizes.load(files)
    packs, loads, features = packed(sizes, counts, (18, 5376))
    iterations, _ = iterations_of(loads, features, 8, 1, "internvl-chat-1.5")
    samples = packs.reordered(iterations.ravel()).sample_ids
    position = np.arange(len(samples))
    generator = np.random.default_rng(0)  # ties in random order
    for values in (sizes.tokens[samples], sizes.tiles[samples], source[samples]):
        assert abs(rank_correlation(position, values + generator.random(len(values)) / 2)) < 0.02
    tenth = len(samples) // 10  # no stretch of the epoch belongs to one source
    shares = [np.bincount(source[samples[i * tenth : (i + 1) * tenth]], minlength=3) / tenth for i in range(10)]
    assert np.allclose(shares, np.bincount(source) / len(source), atol=0.1)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_dear_iterations_come_among_cheap_ones(seed: int, micro: int) -> None:
    """Ranks of one cost make an iteration; that these are found from the cheapest on says nothing of when they run."""
    generator = np.random.default_rng(seed)
    seconds = generator.lognormal(0, 1, (1200 * micro, 1))
    ranks = np.argsort(seconds[:, 0]).reshape(-1, micro)
    slots = order_iterations(seconds, np.zeros((len(seconds), 0)), ranks, 4, 0.003, seed)
    cost = seconds[slots, 0].sum(axis=(1, 2))
    assert cost.max() > 20 * cost.min()
    assert abs(np.corrcoef(np.arange(len(cost)), np.log(cost))[0, 1]) < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_a_kind_that_is_in_few_packs_is_in_every_iteration(seed: int) -> None:
    """One pack of eight has it; the pack's sums do not tell."""
    has = np.random.default_rng(seed).permutation(1600) % 8 == 0
    features = Features(np.zeros((1600, 1)), 1, [], has[:, None])
    order = order_of(np.ones((1600, 1)), features.scaled(features.deviations()), 8, 1, seed)
    assert has[order].reshape(-1, 8).any(axis=1).mean() > 0.95


def test_more_waiting_lets_iterations_look_more_like_the_corpus(tmp_path: Path) -> None:
    corpus, spreads = Corpus(*sources_of(UNTUNED["single tiles"][0](8_000))), []
    for share in (0.001, 0.003, 0.012):
        options = PackOptions(vit_budget=8, llm_budget=4_096, data_parallel_size=8, wait=share)
        _, summary = build_index(corpus, tmp_path / str(share), options)
        assert summary.wait <= share
        spreads.append(summary.spread_sizes)
    assert spreads[0] > spreads[1] > 1.5 * spreads[2]


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [16, 64])
def test_ranks_of_parts_that_go_against_each_other_meet_their_like(ranks: int, seed: int) -> None:
    """Five numbers of tiles, and tokens of any number: a sum says little of either part, and neither may wait."""
    generator = np.random.default_rng(seed)
    seconds = np.stack([generator.integers(22, 27, 40 * ranks) / 40, generator.uniform(0.4, 0.45, 40 * ranks)], axis=1)
    by_sum = np.argsort(seconds.sum(axis=1)).reshape(-1, ranks)
    every = np.arange(len(seconds))[:, None]
    slots = order_iterations(seconds, generator.normal(size=(len(seconds), 2)), every, ranks, 0.003, seed)
    assert np.array_equal(np.sort(slots.ravel()), np.arange(len(seconds)))
    assert wait(seconds[by_sum]) > 0.02
    assert wait(rank_loads(slots, seconds)) < 0.006
