"""Packs of a buffer: each sample once, within budgets, few, and equal where samples can be exchanged."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from benchmarks.corpora import UNTUNED
from omnibal_ext.errors import UserError
from omnibal_ext.packing import pack
from omnibal_ext.packing.costs import PackCosts
from tests.unit.packing.corpora import REPOSITORY, first_fit_packs


@pytest.mark.parametrize("name", UNTUNED)
def test_each_sample_is_in_one_pack_within_both_budgets(name: str) -> None:
    make, (vit_budget, llm_budget) = UNTUNED[name]
    sizes = make(700)
    packs = pack(sizes.tiles, sizes.tokens, vit_budget, llm_budget)
    assert sorted(sample for group in packs for sample in group) == list(range(700))
    assert max(sizes.tiles[group].sum() for group in packs) <= vit_budget
    assert max(sizes.tokens[group].sum() for group in packs) <= llm_budget
    matrix = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
    assert len(packs) <= first_fit_packs(matrix, np.array([vit_budget, llm_budget]))


def test_random_buffers_of_any_length() -> None:
    random = np.random.default_rng(1)
    for _ in range(40):
        count, vit_budget, llm_budget = random.integers((0, 0, 1), (60, 12, 500))
        tiles, tokens = random.integers(0, vit_budget + 1, count), random.integers(1, llm_budget + 1, count)
        packs = pack(tiles, tokens, int(vit_budget), int(llm_budget))
        assert sorted(sample for group in packs for sample in group) == list(range(count))
        assert all(tiles[group].sum() <= vit_budget and tokens[group].sum() <= llm_budget for group in packs)
        assert all(packs)


def test_equal_inputs_give_equal_packs_and_seeds_others() -> None:
    sizes = UNTUNED["independent"][0](300)
    first, again, other = (pack(sizes.tiles, sizes.tokens, 48, 8192, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_packs_come_in_random_order() -> None:
    """Packers begin with the largest samples, which would make a curriculum of every buffer."""
    sizes = UNTUNED["heavy tails"][0](2000)
    counts = np.array([len(group) for group in pack(sizes.tiles, sizes.tokens, 12, 4096)])
    half = len(counts) // 2
    assert abs(counts[:half].mean() / counts[half:].mean() - 1) < 0.2


def deviation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def loads_of(packs: list[list[int]], tiles: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Tiles, tokens and squared tokens of each pack."""
    return np.array([(tiles[group].sum(), tokens[group].sum(), (tokens[group] ** 2).sum()) for group in packs])


def test_packs_are_equal_in_tiles_and_in_tokens_or_in_seconds_of_costs() -> None:
    """Nine samples fill the tiles of a pack and a quarter of its tokens, so that exchanges are free."""
    random = np.random.default_rng(0)
    sizes = random.integers(0, 5, 900), random.integers(50, 150, 900)
    both = PackCosts({"vision": {"tiles": 1.0}, "language": {"attention": 1e-3}})
    one = PackCosts({"all": {"tiles": 50.0, "attention": 0.01}})
    by_sizes, by_both, by_one = (
        loads_of(pack(*sizes, 18, 4000, costs=costs, seconds=0.1), *sizes) for costs in (None, both, one)
    )
    in_turn = loads_of([list(range(at, at + 9)) for at in range(0, 900, 9)], *sizes)
    assert deviation(by_sizes[:, 1]) < 0.02 < 0.3 * deviation(in_turn[:, 1])
    assert deviation(by_both[:, 2]) < 0.02 < 0.3 * deviation(by_sizes[:, 2])
    assert deviation(by_one @ [50, 0, 0.01]) < 0.02 < 0.3 * deviation(in_turn @ [50, 0, 0.01])
    as_built = loads_of(pack(*sizes, 18, 4000, seconds=0), *sizes)
    assert deviation(as_built[:, 1]) > deviation(loads_of(pack(*sizes, 18, 4000), *sizes)[:, 1])


def test_a_sample_beyond_a_budget_is_refused_left_out_or_alone(capsys: pytest.CaptureFixture[str]) -> None:
    tiles, tokens = [1, 9, 2, 0], [10, 20, 30, 101]
    with pytest.raises(UserError, match=r"sample 1 has 9 tiles and 20 tokens, a pack holds 4 tiles and 100 tokens"):
        pack(tiles, tokens, 4, 100)
    assert capsys.readouterr().err == ""
    assert pack(tiles, tokens, 4, 100, beyond="drop") in ([[0, 2]], [[2, 0]])
    assert "sample 1 has 9 tiles" in (said := capsys.readouterr().err)
    assert "2 of 4" in said
    assert sorted(sorted(group) for group in pack(tiles, tokens, 4, 100, beyond="alone")) == [[0, 2], [1], [3]]
    assert capsys.readouterr().err == ""
    assert pack([9], [1], 4, 100, beyond="drop") == pack([], [], 4, 100) == []


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        (([1], [1, 2], 1, 1), {}, "two lists of one length"), (([1.5], [1], 1, 1), {}, "whole numbers"),
        (([0], [0], 1, 1), {}, "row 0: tokens is 0"), (([1], [1], 0, 1), {}, "raise the budgets"),
        *((([0], [1], budget, 1), {}, "vit_budget must be a whole number") for budget in (-1, None, 12.5, 1e9)),
        *((([0], [1], 0, budget), {}, "llm_budget must be a whole number of at least 1, got")
          for budget in (0, -1, None, "4096", 4096.0, float("nan"), True)),
        *((([0], [1], 0, 1), {"seed": seed}, "seed must be a whole number") for seed in (-1, 1.5, None)),
        (([0], [1], 0, 1), {"costs": {"vision": {"tiles": 1.0}}}, "costs must be a PackCosts"),
        (([0], [1], 0, 1), {"seconds": "0.1"}, "seconds='0.1'"),
        (([1], [1], 1, 1), {"beyond": "skip"}, "beyond='skip': must be one of error, drop, alone"),
        *((([1], [1], 1, 1), {"seconds": seconds}, "seconds=") for seconds in (-1, float("inf"), float("nan"))),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(arguments: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        pack(*arguments, **more)
    assert "\n" not in str(caught.value)


def test_budgets_may_be_numpys_or_above_all_that_there_is() -> None:
    assert sorted(pack([1, 2], [5, 6], np.int64(3), 2**40)[0]) == [0, 1]


@pytest.mark.parametrize("many", [False, True])
def test_the_default_effort_leaves_what_half_a_second_leaves(many: bool) -> None:
    """Of 4,096 samples with tiles or patches; the deviation of packs in tokens, which waiting follows."""
    random = np.random.default_rng(3)
    tiles = random.integers(0, 3000, 4096) if many else random.integers(0, 8, 4096)
    sizes = tiles, (tiles // 4 if many else 256 * tiles) + random.integers(20, 900, 4096)
    packs = {effort: pack(*sizes, 30000 if many else 48, 16384, seconds=effort) for effort in (None, 0.5, 0.02)}
    left = {effort: deviation(loads_of(groups, *sizes)[:, 1]) for effort, groups in packs.items()}
    assert left[None] <= 1.05 * left[0.5] < 0.8 * left[0.02]


def test_a_warmed_packer_compiles_nothing_more() -> None:
    """A random buffer of tiles, one of patches, and costs use no function that `warm_up` has not called."""
    used = """
import numpy as np
from numba.core.dispatcher import Dispatcher
from omnibal_ext.packing import pack, warm_up
from omnibal_ext.packing.costs import PackCosts
signatures, compiled = [], Dispatcher.compile
Dispatcher.compile = lambda self, signature: signatures.append((self, signature)) or compiled(self, signature)
warm_up()
before = {(function.py_func, str(signature)) for function, signature in signatures}
random = np.random.default_rng(0)
for tiles in (random.integers(0, 6, 700), random.integers(0, 4000, 700)):
    costs = PackCosts({"one": {"tiles": 1.0, "attention": 1e-3}})
    for how in (None, costs):
        pack(tiles, tiles // 4 + random.integers(2, 60, 700), 2 * tiles.max(), 4096, costs=how)
after = {(function.py_func, str(signature)) for function, signature in signatures}
assert before and after == before, after - before
"""
    subprocess.run([sys.executable, "-c", used], cwd=REPOSITORY, check=True)


def test_importing_a_module_of_the_package_loads_no_packer() -> None:
    code = """
import sys, omnibal_ext.packing.packs, omnibal_ext.packing
assert "numba" not in sys.modules
assert callable(omnibal_ext.packing.pack) and not hasattr(omnibal_ext.packing, "unpack")
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
