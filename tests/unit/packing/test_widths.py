"""Widths: the fewest ranks that hold a sample; what cannot be a team is refused. Narrow packs first: so many
iterations of them, then all others; each sample once, each iteration at its place.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index, reject_reasons
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.widths import read_widths, sample_widths, widths_for
from omnibal_ext.sizes import Sizes

BUDGET = 256
OPTIONS = PackOptions(
    vit_budget=40, llm_budget=BUDGET, data_parallel_size=4, micro_batches=2, widths=(1, 2, 4), seconds=0.05,
    pipeline_model_parallel_size=1, narrow_first=3,
)  # fmt: skip


def corpus(samples: int, seed: int = 0, long: float = 0.1) -> Sizes:
    """A tenth, or another share, take two or four ranks."""
    random = np.random.default_rng(seed)
    tokens = np.where(random.random(samples) < long, random.integers(BUDGET, 4 * BUDGET, samples), 0)
    return Sizes.from_arrays(random.integers(0, 4, samples), np.where(tokens, tokens, random.integers(9, 120, samples)))


def long_samples(index: PackedIndex, sizes: Sizes, table: np.ndarray) -> int:
    """Those of an iteration that no rank holds alone."""
    own = np.concatenate([index.samples(pack) for pack in np.unique(table[table >= 0])])
    return int((sizes.tokens[own] > BUDGET).sum())


@settings(max_examples=8)
@given(st.integers(0, 2**20), st.integers(1, 8), st.sampled_from([(4, 2), (8, 1), (4, 4)]), st.booleans())
def test_first_so_many_narrow_iterations_then_every_other_sample_once(
    seed: int, iterations: int, ranks: tuple[int, int], apart: bool
) -> None:
    sizes = corpus(1200, seed)
    options = replace(OPTIONS, narrow_first=iterations, seed=seed, data_parallel_size=ranks[0], micro_batches=ranks[1])
    whole = Corpus(sizes, (CorpusSource("a", 400, 2.0), CorpusSource("b", 800, 1.0)))
    whole = replace(whole, groups=whole.source_numbers() if apart else None)
    with TemporaryDirectory() as folder:
        index, summary = build_index(whole, folder, options)
        stream = PackStream(index, *ranks)
        tables = stream.iterations(0, summary.iterations)
        assert (tables[:iterations] >= 0).all()
        packs = np.unique(tables[:iterations])
        assert len(packs) == iterations * ranks[0] * ranks[1]
        assert {index.width(pack) for pack in packs.tolist()} == {1}
        assert sum(long_samples(index, sizes, table) for table in tables[:iterations]) == 0
        long = sizes.tokens > BUDGET
        assert long_samples(index, sizes, tables[iterations:]) == 2 * long[:400].sum() + long[400:].sum()
        assert np.unique(tables[tables >= 0]).tolist() == list(range(index.num_packs))
        assert np.bincount(index.sample_ids).tolist() == [2] * 400 + [1] * 800
        twice = PackStream(PackedIndex.open(folder), 8, ranks[0] * ranks[1] // 8)  # a run that goes on with other ranks
        for number in (0, iterations - 1, iterations):
            assert np.unique(twice.iteration(number)).tolist() == np.unique(tables[number]).tolist()


def test_they_are_filled_balanced_and_random_and_others_have_their_part_of_long_samples(tmp_path: Path) -> None:
    sizes = corpus(6000, long=0.02)
    options = replace(OPTIONS, micro_batches=8, narrow_first=4)
    index, summary = build_index(sizes, tmp_path / "index", options)
    tables = PackStream(index, 4, 8).iterations(0, summary.iterations)
    first = np.concatenate([index.samples(pack) for pack in np.unique(tables[:4])])
    assert sizes.tokens[first].sum() > 0.95 * 4 * 32 * BUDGET
    seconds = np.take(index.seconds(np.arange(index.num_packs)).sum(axis=1), tables[:4]).sum(axis=2)
    assert 1 - seconds.mean(axis=1).sum() / seconds.max(axis=1).sum() < 0.003
    narrow = sizes.tokens[sizes.tokens <= BUDGET]
    assert sizes.tokens[first].mean() == pytest.approx(narrow.mean(), abs=4 * narrow.std() / np.sqrt(len(first)))
    assert {long_samples(index, sizes, table) for table in tables[4:]} == {2, 3}


def test_a_later_epoch_has_them_among_the_others_and_one_packed_apart_has_none(tmp_path: Path) -> None:
    sizes = corpus(3000)
    index, _ = build_index(sizes, tmp_path / "one", OPTIONS)
    stream = PackStream(index, 4, 2)
    again = stream.iterations(stream.first_iteration(1), stream.first_iteration(2))
    long = [long_samples(index, sizes, table) > 0 for table in again]
    assert long.count(False) >= 3
    assert any(long[:3])
    index, _ = build_index(sizes, tmp_path / "two", replace(OPTIONS, epochs=2))
    plain, _ = build_index(sizes, tmp_path / "plain", replace(OPTIONS, epochs=2, narrow_first=0))
    ends = [each.manifest["epoch_packs"][0] for each in (index, plain)]
    second = [each.sample_ids[each.pack_offsets[end] :] for each, end in zip((index, plain), ends, strict=True)]
    assert second[0].tolist() == second[1].tolist()
    assert index.manifest["narrow_first"] == 3
    assert "narrow_first" not in plain.manifest


def test_more_narrow_iterations_than_samples_fill_are_refused(tmp_path: Path) -> None:
    sizes = corpus(400)
    narrow = sizes.tokens <= BUDGET
    most = int(max(sizes.tokens[narrow].sum() / BUDGET, sizes.tiles[narrow].sum() / 40) // 8)
    index, _ = build_index(sizes, tmp_path / "most", replace(OPTIONS, narrow_first=most))
    assert np.sort(index.sample_ids).tolist() == list(range(400))
    with pytest.raises(UserError, match=rf"-first {most + 1}: samples that fit one rank suffice for {most} iterations"):
        build_index(sizes, tmp_path / "more", replace(OPTIONS, narrow_first=most + 1))
    assert not (tmp_path / "more").exists()


def test_what_has_no_narrow_packs_is_refused_and_what_has_no_others_is_as_it_is(tmp_path: Path) -> None:
    for more, says in (({"widths": (2, 4)}, "width 1 among"), ({"narrow_first": -1}, "0")):
        with pytest.raises(UserError, match=f"--narrow-first .*{says}"):
            replace(OPTIONS, **more)  # type: ignore[arg-type]
    sizes = corpus(400)
    short = sizes.take(np.flatnonzero(sizes.tokens <= BUDGET))
    plain, _ = build_index(short, tmp_path / "plain", replace(OPTIONS, widths=(1,), narrow_first=0))
    offered, _ = build_index(short, tmp_path / "offered", OPTIONS)
    assert plain.manifest == offered.manifest


TEAMS = PackOptions(vit_budget=4, llm_budget=100, budgets={"frames": 10, "more": 0}, data_parallel_size=8)


def test_a_sample_is_as_wide_as_the_size_that_needs_most_ranks() -> None:
    tokens, tiles = [100, 101, 1, 1, 400, 401, 1], [4, 1, 5, 0, 0, 0, 0]
    sizes = Sizes.from_arrays(tiles, tokens, frames=[0, 0, 0, 31, 0, 0, 0], more=[9, 9, 9, 9, 9, 9, 10**6])
    assert sample_widths(sizes, TEAMS, (1, 2, 4)).tolist() == [1, 2, 2, 4, 4, 0, 1]
    assert sample_widths(sizes, TEAMS, (4,)).tolist() == [4, 4, 4, 4, 4, 0, 4]
    no_tiles = PackOptions(llm_budget=100, data_parallel_size=8)
    assert sample_widths(Sizes.from_arrays([0, 1], [5, 5]), no_tiles, (1, 2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("longest", "ranks", "widths"),
    [(100, 8, (1,)), (150, 8, (1, 2)), (790, 8, (1, 8)), (5000, 64, (1,)), (790, 4, (1,)), (390, 12, (1, 4))],
)
def test_auto_takes_the_widths_that_samples_need_within_a_node(
    longest: int, ranks: int, widths: tuple[int, ...]
) -> None:
    """A sample that no team of a node holds is not what it is chosen for: it is left out, and said to be."""
    options = PackOptions(llm_budget=100, data_parallel_size=ranks)
    found = widths_for(Sizes.from_arrays([0, 0], [50, longest]), options, ranks)
    assert found == widths


def test_widths_are_read_as_written() -> None:
    assert read_widths("1,2,8") == (1, 2, 8)
    assert read_widths("auto") is None


@pytest.mark.parametrize(
    ("widths", "more", "says"),
    [
        ((1, 3, 8), {}, "8 must be a multiple of 3"), ((2, 2), {}, "2 must be a multiple of 2"),
        ((0, 2), {}, "1 rank or more"), ((1, 8), {"data_parallel_size": 12}, "must divide --data-parallel-size 12"),
        ((1, 16), {}, "must divide --data-parallel-size 8"), ((1, 2), {"method": "random"}, "use balanced"),
        ((2,), {"method": "isf"}, "use balanced"), ((1, 2), {"oversize": "alone"}, "--oversize alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_team_is_refused(widths: tuple[int, ...], more: dict[str, object], says: str) -> None:
    given = {"llm_budget": 100, "data_parallel_size": 8, **more}
    with pytest.raises(UserError, match=says):
        PackOptions(widths=widths, **given)  # type: ignore[arg-type]


def test_a_sample_beyond_the_widest_team_is_left_out_with_its_place(tmp_path: Path) -> None:
    sizes = Sizes.from_arrays([0] * 20, [50] * 18 + [400, 401])
    options = PackOptions(llm_budget=100, data_parallel_size=4, widths=(1, 4))
    assert np.flatnonzero(reject_reasons(sizes, options)).tolist() == [19]
    index, summary = build_index(sizes, tmp_path / "index", options)
    assert summary.rejected == 1
    line = (index.folder / "rejected.jsonl").read_text()
    assert '"row": 19' in line
    assert "401 tokens of 400 on 4 ranks" in line
    with pytest.raises(UserError, match="packs of 4 ranks, which must divide the 2 data-parallel ranks"):
        PackStream(index, 2, 2)
    with pytest.raises(UserError, match="packs wider than a rank"):
        PackBatchSampler(index, 4)
