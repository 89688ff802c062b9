"""The benchmark of loss curves: what it trains on is the same samples, and what it measures is what losses deviate."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.loss_curve import ORDERS, about_trend, pack, print_narrow_first, spreads
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("deviation", [0.05, 0.4])
def test_deviation_from_a_falling_trend_is_found(seed: int, deviation: float) -> None:
    steps = np.arange(4_000)
    trend = 3.0 * np.exp(-steps / 900) + 0.1
    losses = trend * np.exp(np.random.default_rng(seed).normal(0, deviation, len(steps)))
    for first in (0, 500):
        assert about_trend(losses, first) == pytest.approx(deviation, rel=0.05)


def test_all_orders_are_of_the_same_samples_and_ours_is_the_most_even(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sizes = Sizes.from_arrays(generator.integers(0, 9, 900), generator.integers(20, 90, 900))
    options = PackOptions(vit_budget=40, llm_budget=400, micro_batches=4)
    like, _ = build_index(sizes, tmp_path / "like", options, {"name": "demo"})
    found = {order: pack(Corpus.of(sizes), like, tmp_path / order, order, 0) for order in ORDERS}
    for index in found.values():
        assert np.array_equal(np.sort(index.sample_ids), np.arange(900))
        index.check({"global_batch": 4, "vit_budget": 40, "llm_budget": 400, "built_from": {"name": "demo"}})
        index.verify()
    tiles = {order: spreads(index)[0] for order, index in found.items()}
    assert tiles["ours"] < 0.5 * tiles["random"] < 0.5 * tiles["alike"]


def test_held_out_losses_are_compared_where_all_runs_have_one_and_at_their_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_narrow_first([{2: 3.0, 4: 2.0, 5: 1.0}, {2: 5.0, 4: 2.0, 5: 2.0}, {2: 3.5, 4: 1.0}, {2: 4.5, 4: 2.0}])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "4.0000", "4.0000", "+0.0000", "±", "0.5000"] in rows
    assert ["end", "1.5000", "1.5000", "+0.0000", "±", "0.0000"] in rows
    assert not any(row[:1] == ["4"] for row in rows)
    assert rows[-1][-1] == "1.000"
