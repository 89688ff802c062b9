"""Automatic budgets: near the lower bound, within their limits, no sample left out."""

import pytest

from benchmarks.corpora import single_tiles
from omnibal_ext.errors import UserError
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.budgets import choose_budgets
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import published_files


def test_published_lengths_reach_the_lower_bound() -> None:
    sizes = Sizes.load(published_files())
    best, trials = choose_budgets(sizes)
    packs = len(pack_balanced(sizes, best.vit_budget, best.llm_budget, seed=0))
    assert packs <= 1.005 * lower_bound_packs(sizes, best.vit_budget, best.llm_budget)
    assert best.waste == min(trial.waste for trial in trials if trial.packs_over_bound <= 1.004)


@pytest.mark.parametrize("limit", [2048, 3000, 4096, 16384])
def test_limits_hold_and_every_sample_fits(limit: int) -> None:
    sizes = single_tiles(3000)
    best, trials = choose_budgets(sizes, max_llm_budget=limit, samples_per_pack=8)
    assert all(trial.llm_budget <= limit for trial in trials)
    assert best.vit_budget >= sizes.tiles.max()
    assert best.llm_budget >= sizes.tokens.max()


def test_a_budget_that_is_given_is_kept() -> None:
    assert {trial.vit_budget for trial in choose_budgets(single_tiles(500), vit_budget=6)[1]} == {6}
    assert {trial.llm_budget for trial in choose_budgets(single_tiles(500), llm_budget=5000)[1]} == {5000}


def test_text_alone_needs_no_tiles() -> None:
    best, _ = choose_budgets(Sizes.from_arrays([0] * 200, [100] * 200), samples_per_pack=5)
    assert best.vit_budget == 0
    assert best.llm_budget >= 500


def test_a_limit_below_the_longest_sample_is_refused() -> None:
    with pytest.raises(UserError, match=r"longest sample has \d+ tokens, --max-llm-budget is 700"):
        choose_budgets(single_tiles(500), max_llm_budget=700)
