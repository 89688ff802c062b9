"""Automatic budgets: near the lower bound, within their limits, no sample left out."""

import pytest

from benchmarks.corpora import single_tiles
from omnibal_ext.errors import UserError
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.budgets import budgets_for, choose_budgets
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import published_files


def test_published_lengths_reach_the_lower_bound() -> None:
    sizes = Sizes.load(published_files())
    best, _ = choose_budgets(sizes)
    packs = len(pack_balanced(sizes, best.vit_budget, best.llm_budget, seed=0))
    assert packs <= 1.005 * lower_bound_packs(sizes, {"tiles": best.vit_budget, "tokens": best.llm_budget})


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


@pytest.mark.parametrize(("samples_per_pack", "limit"), [(4.0, None), (8.0, None), (4.0, 2048), (8.0, 3000)])
def test_budgets_are_chosen_by_what_was_tried(samples_per_pack: float, limit: int | None) -> None:
    """Tiles from 3/4 to 5/4 of what so many samples have, tokens 0, 2 and 6 % over what the tiles bring, in 64s; of
    those near the lower bound the pair that leaves least unused."""
    sizes = single_tiles(400)
    best, trials = choose_budgets(sizes, max_llm_budget=limit, samples_per_pack=samples_per_pack)
    tiles, tokens = sizes.tiles.tolist(), sizes.tokens.tolist()
    mean_tiles, mean_tokens = sum(tiles) / 400, sum(tokens) / 400
    aim = samples_per_pack * mean_tiles
    aim = aim if limit is None else min(aim, limit * mean_tiles / mean_tokens)
    low = max(*tiles, round(0.75 * aim))
    high = max(round(1.25 * aim), low + low // 4)
    assert {min(t.vit_budget for t in trials), max(t.vit_budget for t in trials)} == {low, high}
    assert len({t.vit_budget for t in trials}) == min(8, high - low + 1)
    for trial in trials:
        average = trial.vit_budget * mean_tokens / mean_tiles
        wished = [max(-(-int(average * room) // 64) * 64, *tokens) for room in (1.0, 1.02, 1.06)]
        assert trial.llm_budget in [budget if limit is None else min(budget, limit) for budget in wished]
        bound = max(-(-sum(tiles) // trial.vit_budget), -(-sum(tokens) // trial.llm_budget))
        packs = trial.packs_over_bound * bound
        assert packs == pytest.approx(round(packs))
        used = (sum(tiles) / (packs * trial.vit_budget) + sum(tokens) / (packs * trial.llm_budget)) / 2
        assert trial.waste == pytest.approx(1 - used)
        assert trial.samples_per_pack == pytest.approx(400 / packs)
    near = [trial for trial in trials if trial.packs_over_bound <= 1.004] or trials
    assert best == trials[0]
    assert best.waste == min(trial.waste for trial in near)


def test_a_sweep_tries_tokens_from_the_longest_sample_on() -> None:
    sizes = single_tiles(200)
    longest = int(sizes.tokens.max())
    found = budgets_for(sizes)
    assert [llm for _, llm in found] == [-(-int(longest * t) // 64) * 64 for t in (1, 1.25, 1.5, 2, 3, 4)]
    for vit, llm in found:
        assert vit == choose_budgets(sizes, llm_budget=llm)[0].vit_budget
