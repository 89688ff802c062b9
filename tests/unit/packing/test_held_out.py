"""Held-out samples: each is in one of two indexes, whatever else is asked; the draw is by number, share and seed."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.held_out import HeldOut
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes
from tools import pack_data

OPTIONS = PackOptions(vit_budget=9, llm_budget=300, data_parallel_size=2, micro_batches=2, last_iteration="empty")


def corpus(count: int = 200, weights: tuple[float, float] = (1.0, 1.0)) -> Corpus:
    generator = np.random.default_rng(count)
    sizes = Sizes.from_arrays(generator.integers(0, 11, count), generator.integers(10, 290, count))
    first = count // 3
    return Corpus(sizes, (CorpusSource("a", first, weights[0]), CorpusSource("b", count - first, weights[1])))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("oversize", ["reject", "alone"])
def test_what_is_held_out_and_the_rest_are_the_corpus(
    tmp_path: Path, weights: tuple[float, float], oversize: str
) -> None:
    """Weights say how often the rest is trained on; an evaluation has each sample once."""
    whole, options = corpus(weights=weights), replace(OPTIONS, oversize=oversize)
    fits = (whole.sizes.tiles <= 9) | (oversize == "alone")
    drawn = HeldOut(0.1, 7).draw(200)
    assert drawn.sum() == 20
    rest, rest_summary = build_index(HeldOut(0.1, 7).of(whole), tmp_path / "rest", options)
    held, held_summary = build_index(HeldOut(0.1, 7, packed=True).of(whole), tmp_path / "held", options)
    assert Counter(held.sample_ids.tolist()) == Counter(np.flatnonzero(drawn & fits).tolist())
    assert set(rest.sample_ids.tolist()) == set(np.flatnonzero(~drawn & fits).tolist())
    assert rest_summary.rejected == np.count_nonzero(~drawn & ~fits)
    assert held_summary.rejected == np.count_nonzero(drawn & ~fits)


def test_the_draw_is_by_seed_and_of_the_share(tmp_path: Path) -> None:
    draws = [HeldOut(0.25, seed).draw(1000) for seed in range(40)]
    assert {int(drawn.sum()) for drawn in draws} == {250}
    often = np.sum(draws, axis=0)
    assert often.min() > 0
    assert often.max() < 25, "no sample is preferred"
    assert np.array_equal(HeldOut(0.25, 3).draw(1000), draws[3])


@pytest.mark.parametrize(("share", "count"), [(0.02, 20), (0.99, 20), (0.5, 0)])
def test_a_share_that_leaves_nothing_is_refused(share: float, count: int) -> None:
    with pytest.raises(UserError, match="must be 1 or more, and leave some"):
        HeldOut(share, 0).draw(count)


def packed(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["pack_data", *map(str, words), "--json"])
    pack_data.main()


def test_the_tool_packs_what_an_index_left_out_within_its_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = corpus().sizes
    np.savez(tmp_path / "sizes.npz", tiles=sizes.tiles, tokens=sizes.tokens)
    common = ("--sizes", tmp_path / "sizes.npz")
    how = ("--vit-budget", 12, "--llm-budget", 400, "--micro-batches", 2, "--seed", 5, "--weights", 2)
    packed(monkeypatch, *common, *how, "--held-out", 0.1, "--output-dir", tmp_path / "rest")
    packed(monkeypatch, *common, "--held-out-of", tmp_path / "rest", "--output-dir", tmp_path / "held")
    packed(monkeypatch, *common, "--like", tmp_path / "rest", "--wait", 0.01, "--output-dir", tmp_path / "again")
    rest, held, again = (pack_data.PackedIndex.open(tmp_path / name) for name in ("rest", "held", "again"))
    assert (held.vit_budget, held.llm_budget, held.global_batch) == (12, 400, 2)
    drawn = np.flatnonzero(HeldOut(0.1, 5).draw(200)).tolist()
    assert sorted(held.sample_ids.tolist()) == drawn
    assert sorted(again.sample_ids.tolist()) == sorted(rest.sample_ids.tolist())
    assert Counter(rest.sample_ids.tolist()) == Counter({n: 2 for n in range(200) if n not in drawn})
    for wrong in ("held", "plain"):
        packed(monkeypatch, *common, *how, "--output-dir", tmp_path / "plain")
        with pytest.raises(UserError, match="leaves no samples out; pack it with --held-out SHARE"):
            packed(monkeypatch, *common, "--held-out-of", tmp_path / wrong, "--output-dir", tmp_path / "x")
