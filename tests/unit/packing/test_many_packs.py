"""Packs beyond `MANY` are mixed as well as fewer: each has the same effort, or the packs of its twin."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing import pack_epoch
from omnibal_ext.packing import twins as twins_module
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index.summary import shortfalls
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering import order_iterations, order_packs
from omnibal_ext.packing.packs import PackList, pack_loads
from omnibal_ext.packing.twins import Twins, count_types
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import assert_packed

OPTIONS = PackOptions(vit_budget=12, llm_budget=4096, data_parallel_size=4)


def words_and_images(samples: int) -> Sizes:
    """A fifth are words alone."""
    generator = np.random.default_rng(1)
    tiles = generator.choice([0, 1, 2, 5], samples, p=[0.2, 0.4, 0.3, 0.1])
    return Sizes.from_arrays(tiles, tiles * 256 + generator.lognormal(5, 0.7, samples).astype(np.int64) + 8)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, effort_at: int) -> list[tuple[float, int]]:
    """Return a list that receives (nominal seconds, packs) of every call of `module.name`."""
    calls: list[tuple[float, int]] = []
    was: Callable[..., Any] = getattr(module, name)

    def noted(*arguments: Any) -> Any:
        packs = arguments[2].size if name == "swap_packs" else len(arguments[0])
        calls.append((arguments[effort_at], packs))
        return was(*arguments)

    monkeypatch.setattr(module, name, noted)
    return calls


@pytest.mark.parametrize("times", [2, 8])
def test_effort_a_pack_has_a_floor_whatever_their_number(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Without twins: samples of several groups, as of native resolution."""
    monkeypatch.setattr(order_packs, "MANY", 50)
    monkeypatch.setattr(order_packs, "CHUNK", 40)
    monkeypatch.setattr(order_packs, "CHUNK_ITERATIONS", 5)
    swaps = counted(monkeypatch, order_iterations, "swap_packs", 5)
    steps = counted(monkeypatch, order_packs, "equalize_packs", 7)
    corpus = Corpus.of(words_and_images(300 * times))
    made = pack_epoch.pack(corpus.sizes, OPTIONS, 0)
    order_packs.order_packs(corpus, made, OPTIONS, pack_epoch.PackCosts.of_model(), 0)
    assert len(made) > 50
    assert sum(packs for _, packs in swaps) > 0.9 * len(made)
    for calls in (swaps, steps):
        assert min(seconds / packs for seconds, packs in calls) >= 0.5 / 50


def uneven_words(samples: int) -> Sizes:
    """Packs of many words have few tiles."""
    generator = np.random.default_rng(2)
    tiles = generator.choice([0, 1, 2, 5], samples, p=[0.1, 0.4, 0.3, 0.2])
    words = np.minimum(generator.lognormal(5, 1, samples), 2000).astype(np.int64)
    return Sizes.from_arrays(tiles, tiles * 256 + words + 8)


@pytest.mark.parametrize(("micro_batches", "wait", "goes_on"), [(1, 0.003, True), (1, 0.3, False), (2, 0.003, False)])
def test_packs_that_stay_uneven_are_equalized_again(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, wait: float, goes_on: bool
) -> None:
    """Where each has a rank of its own, so that nothing makes up for it."""
    monkeypatch.setattr(order_packs, "MANY", 50)
    was, deviations = order_packs.equalize_packs, list[float]()
    options = replace(OPTIONS, vit_budget=18, wait=wait, micro_batches=micro_batches, seconds=0.002)

    def noted(packs: PackList, *arguments: Any) -> PackList:
        packs = was(packs, *arguments)
        deviations.append(np.add.reduceat(arguments[2][packs.sample_ids], packs.pack_offsets[:-1]).sum(axis=1).std())
        return packs

    monkeypatch.setattr(order_packs, "equalize_packs", noted)
    corpus = Corpus.of(uneven_words(800))
    made = pack_epoch.pack(corpus.sizes, options, 0)
    order_packs.order_packs(corpus, made, options, pack_epoch.PackCosts.of_model(), 0)
    assert len(deviations) == (2 if goes_on else micro_batches)
    if goes_on:
        assert deviations[1] < 0.95 * deviations[0]


def twins_of(corpus: Corpus, packed: Any, count: int) -> Twins:
    types = count_types(corpus, packed, OPTIONS.all_budgets)
    assert types is not None
    return Twins(corpus, packed, types, count, 0)


def test_twins_differ_in_few_tokens_alone_and_each_sample_is_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the longest's packs, here of one sample each, is not dealt."""
    monkeypatch.setattr(twins_module, "LONGER", 0.02)
    sizes = words_and_images(20_000)
    corpus = Corpus(sizes, (CorpusSource("a", 12_000), CorpusSource("b", 8_000)), supervised=sizes.tokens // 2)
    packed = np.arange(20_000) % 7 > 0
    twins = twins_of(corpus, packed, 6)
    head, numbers = twins.head, np.arange(len(twins.head.sizes))
    assert twins.are_alike
    assert 0 < packed.sum() - 6 * len(numbers) < 6 * 8
    kept = np.random.default_rng(0).permutation(numbers)[: len(numbers) // 3 * 2]
    left = twins.deal(PackList(np.arange(len(kept) + 1), kept))
    copies = [twins.copy(copy) for copy in range(6)]
    dealt = np.stack([copy.packs.sample_ids for copy in copies])
    assert np.array_equal(np.sort(np.append(dealt, left)), np.flatnonzero(packed))
    assert (np.diff(left) > 0).all()
    assert (sizes.tiles[dealt] == head.sizes.tiles[kept]).all()
    assert ((dealt >= 12_000) == head.source_numbers()[kept]).all()
    assert (sizes.tokens[dealt] <= head.sizes.tokens[kept]).all()
    assert head.sizes.tokens[kept].sum() * 6 <= 1.02 * sizes.tokens[dealt].sum()
    assert head.supervised is not None
    assert np.abs(head.supervised - head.sizes.tokens / 2).max() <= 1
    for copy in copies:
        assert np.array_equal(copy.loads, pack_loads(copy.packs, sizes))
    for copy in dealt:  # a fair sample of the corpus
        assert abs(copy.mean() - np.flatnonzero(packed).mean()) < 400


def test_a_sample_beyond_a_budget_hinders_no_twins() -> None:
    """It is left out, and would be a type among a million that nothing has."""
    sizes = words_and_images(1000)
    tokens = np.append(sizes.tokens, 3_000_000)
    corpus, packed = Corpus.of(Sizes(np.append(sizes.tiles, 1), tokens)), np.arange(1001) < 1000
    types = count_types(corpus, packed, OPTIONS.all_budgets)
    assert types is not None
    assert types.counts.sum() == 1000


@pytest.mark.parametrize("change", ["longer", "more tiles", "another of the same"])
def test_sizes_that_change_while_they_are_packed_are_refused(change: str) -> None:
    """Samples would be packed twice or not at all."""
    sizes = words_and_images(2000)
    corpus, packed = Corpus.of(sizes), np.ones(2000, np.bool_)
    twins = twins_of(corpus, packed, 4)
    if change == "longer":
        sizes.tokens[7] = 10**6
    elif change == "more tiles":
        sizes.tiles[7] = 1000
    else:
        sizes.tokens[7] = sizes.tokens[np.flatnonzero(sizes.tokens != sizes.tokens[7])[0]]
    with pytest.raises(UserError, match="have changed while they were packed"):
        twins.deal(PackList(np.arange(len(twins.head.sizes) + 1), np.arange(len(twins.head.sizes))))


@pytest.mark.parametrize("case", ["further sizes", "groups", "few samples"])
def test_samples_that_differ_have_no_twins(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(twins_module, "LONGER", 0.02)
    sizes = words_and_images(100 if case == "few samples" else 20_000)
    if case == "further sizes":
        sizes = Sizes(sizes.tiles, sizes.tokens, {"frames": sizes.tokens})
    corpus = Corpus.of(sizes)
    corpus = corpus.grouped(sizes.tiles) if case == "groups" else corpus
    packed = np.ones(len(sizes), np.bool_)
    if case == "few samples":
        assert not twins_of(corpus, packed, 6).are_alike
    else:
        assert count_types(corpus, packed, OPTIONS.all_budgets) is None


def test_packs_of_twins_hold_all_samples_within_budgets_and_are_as_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = Corpus.of(words_and_images(24_000))
    _whole, before = build_index(corpus, tmp_path / "whole", OPTIONS)
    monkeypatch.setattr(pack_epoch, "MANY", 700)
    monkeypatch.setattr(twins_module, "LONGER", 0.02)
    packed: list[int] = []

    def noted(sizes: Sizes, options: PackOptions, seed: int) -> pack_epoch.PackList:
        packed.append(len(sizes))
        return pack_epoch.pack(sizes, options, seed)

    index, after = build_index(corpus, tmp_path / "twins", OPTIONS, packer=partial(pack_epoch.pack_epoch, make=noted))
    packs = pack_epoch.PackList(np.asarray(index.pack_offsets), np.asarray(index.sample_ids))
    assert_packed(packs, corpus.sizes, OPTIONS.vit_budget, OPTIONS.llm_budget)
    assert sum(packed) < len(corpus.sizes) / 3  # one of four twins, and few others
    assert after.packs <= 1.005 * before.packs
    assert after.wait <= 1.25 * OPTIONS.wait  # of so few samples twins differ more
    assert max(after.spread_sizes, after.spread_sources) <= 1.1
    loads = np.asarray(index.loads[: after.iterations * 4 - 4]).reshape(-1, 4, 3).sum(axis=1)
    assert len(np.unique(loads[: len(loads) // 3], axis=0)) > len(loads) // 6  # twins do not follow each other


def waits(seconds: Floats) -> float:
    return float(1 - seconds.mean() / seconds.max())


@pytest.mark.parametrize("ranks", [7, 16])
def test_the_last_iteration_waits_no_longer_than_others(tmp_path: Path, ranks: int) -> None:
    """Of one pack a rank: what is left over costs the same, and what completes it of the next epoch does too."""
    options = PackOptions(vit_budget=12, llm_budget=4096, data_parallel_size=ranks)
    index, summary = build_index(words_and_images(9_000), tmp_path / "packs", options)
    seconds = index.seconds(np.arange(index.num_packs)).sum(axis=1)
    left = index.num_packs % ranks
    assert left
    for epoch in range(3):  # later ones take the first packs of other iterations
        first: Ints = pack_epoch.opened_groups(0, 0, index.num_packs // ranks)[[epoch]] * ranks
        fill = np.arange(int(first[0]), int(first[0]) + ranks - left)
        assert waits(np.concatenate([seconds[-left:], seconds[fill]])) < 0.004
    assert summary.wait_last < 0.004


def test_advice_names_seconds_where_these_are_what_lacks(tmp_path: Path) -> None:
    """And the wait allowed where effort was there."""
    found = []
    for number, seconds in enumerate((1e-5, 1.0)):
        options = PackOptions(vit_budget=12, llm_budget=4096, data_parallel_size=4, seconds=seconds, wait=1e-5)
        _, summary = build_index(words_and_images(9_000), tmp_path / str(number), options)
        found.append(shortfalls(summary, options)[-1])
    assert "--seconds" in found[0]
    assert "--seconds" not in found[1]
    assert "--wait" in found[1]
