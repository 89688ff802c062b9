"""HBP as printed: its levels, its greedy fill and its order, each written anew here."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.hierarchical import balance_ratio, hierarchical_iterations, pack_hierarchical
from omnibal_ext.packing.packs import PackList, pack_loads
from omnibal_ext.sizes import Sizes

BUDGETS, WIDTHS = (6, 1000), (1, 2, 4)


def drawn(seed: int) -> tuple[Sizes, np.ndarray]:
    random = np.random.default_rng(seed)
    tokens = np.exp(random.uniform(np.log(20), np.log(4000), 300)).astype(np.int64)
    sizes = Sizes.from_arrays(random.integers(0, 7, 300), tokens)
    return sizes, np.select([tokens <= 1000, tokens <= 2000], [1, 2], 4)


@pytest.mark.parametrize("seed", range(6))
def test_packs_take_of_the_levels_below_what_fits_the_next_one_and_the_longest_first(seed: int) -> None:
    """From the highest level down: what the packs of each hold of their own is filled again, sample after sample."""
    sizes, levels = drawn(seed)
    packs, widths = pack_hierarchical(sizes, *BUDGETS, WIDTHS, levels, seed=seed)
    assert np.sort(packs.sample_ids).tolist() == list(range(300))
    assert widths.tolist() == sorted(widths.tolist(), reverse=True)
    left = set(range(300))
    for pack, width in enumerate(widths.tolist()):
        held = packs.sample_ids[packs.pack_offsets[pack] : packs.pack_offsets[pack + 1]]
        mine = [sample for sample in held.tolist() if levels[sample] == width]
        assert mine
        tiles, tokens = (
            width * most - int(of[mine].sum()) for most, of in zip(BUDGETS, (sizes.tiles, sizes.tokens), strict=True)
        )
        assert min(tiles, tokens) >= 0
        below = [sample for sample in left if levels[sample] < width]
        taken = []
        for sample in sorted(below, key=lambda each: (-levels[each], -sizes.tokens[each], -each)):
            if sizes.tiles[sample] <= tiles and sizes.tokens[sample] <= tokens:
                taken.append(sample)
                tiles, tokens = tiles - int(sizes.tiles[sample]), tokens - int(sizes.tokens[sample])
        assert sorted(held.tolist()) == sorted(mine + taken)
        left -= set(mine + taken)


def test_iterations_are_of_one_level_and_of_packs_of_like_attention_in_any_order() -> None:
    sizes, levels = drawn(9)
    packs, widths = pack_hierarchical(sizes, *BUDGETS, WIDTHS, levels, seed=0)
    loads = pack_loads(packs, sizes)
    tables = hierarchical_iterations(loads, widths, 8, 2, seed=0)
    assert np.unique(tables[tables >= 0]).tolist() == list(range(len(packs)))
    orders = []
    for width in WIDTHS:
        mine = [(place, np.unique(table[table >= 0])) for place, table in enumerate(tables)]
        mine = [(place, own) for place, own in mine if widths[own[0]] == width]
        assert all((widths[own] == width).all() for _, own in mine)
        squares = sorted((squares_of(packs, sizes, own), place) for place, own in mine)
        for (lower, _), (higher, _) in pairwise(squares):
            assert max(lower) <= min(higher)
        orders.append([place for _, place in squares])
    assert any(order != sorted(order) for order in orders)


def squares_of(packs: PackList, sizes: Sizes, own: np.ndarray) -> list[int]:
    offsets, samples = packs.pack_offsets, packs.sample_ids
    return sorted(int((sizes.tokens[samples[offsets[pack] : offsets[pack + 1]]] ** 2).sum()) for pack in own.tolist())


def test_ranks_of_a_pack_count_as_equal_parts_and_iterations_with_empty_slots_do_not() -> None:
    """DBR and ABR of HBP: packs of 10 on two ranks, of 8 and 4 on one, of 4 alone in an iteration with empty slots."""
    loads, widths = np.array([10, 8, 4, 4]), np.array([2, 1, 1, 1])
    iterations = np.array([[[0], [0], [1], [2]], [[3], [-1], [-1], [-1]]])
    assert balance_ratio(iterations, loads, widths) == pytest.approx((3 + 3 + 0 + 4) / (8 * 4))
    assert balance_ratio(iterations[1:], loads, widths) == 0.75  # where all have empty slots, all count
