"""What peers put together, and the figures that are made of training on it."""

import importlib.util

import numpy as np
import pytest

from benchmarks import peer_orders
from benchmarks.peer_orders import WAYS, Question
from benchmarks.peers import OURS, cases_of, of_tokens, our_steps, row_of
from benchmarks.two_ranks import Trained
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.sizes import Sizes

RANKS, BATCH = 2, 4
SAMPLES = 206
"""51 batches: the last one is too few for a step."""


def question(tiles: list[int], tokens: list[int], most_tiles: int = 6, most_tokens: int = 100) -> Question:
    """Ten tokens of a tile."""
    images = [10 * count for count in tiles]
    return Question(tokens, tiles, images, most_tokens, most_tiles, BATCH, RANKS, seed=1)


@pytest.fixture(scope="module")
def many() -> Question:
    random = np.random.default_rng(0)
    tiles = random.integers(0, 4, SAMPLES)
    return question(tiles.tolist(), (10 * tiles + random.integers(1, 40, SAMPLES)).tolist())


@pytest.mark.parametrize("name", WAYS)
def test_a_step_is_a_pack_a_rank_and_no_sample_comes_twice(name: str, many: Question) -> None:
    package, way = WAYS[name]
    if not peer_orders.is_here(package):
        pytest.skip(f"{package} is not installed here")
    steps = way(many)
    packs = [pack for step in steps for pack in step]
    taken = [int(sample) for pack in packs for sample in pack]
    assert all(len(step) == RANKS for step in steps)
    assert len(set(taken)) == len(taken) > 100
    assert set(taken) <= set(range(SAMPLES))
    if not name.startswith("Trainer"):
        assert max(sum(many.tokens[sample] for sample in pack) for pack in packs) <= many.most_tokens
    if name.startswith("InternVL"):
        assert max(sum(many.tiles[sample] for sample in pack) for pack in packs) <= many.most_tiles


def test_trainers_ways_group_alike_lengths_or_level_ranks(many: Question) -> None:
    tokens = np.array(many.tokens)
    spread = {name: np.mean([np.ptp(tokens[list(pack)]) for step in WAYS[name][1](many) for pack in step])
              for name in ("Trainer, random", "Trainer, group_by_length")}  # fmt: skip
    assert spread["Trainer, group_by_length"] < 0.5 * spread["Trainer, random"]
    assert {len(pack) for step in peer_orders.group_by_length(many) for pack in step} == {BATCH}
    rebalanced = peer_orders.batch_rebalance(many)
    assert len({len(pack) for step in rebalanced for pack in step}) > 1  # of long samples fewer
    assert {sum(map(len, step)) for step in rebalanced} == {BATCH * RANKS}


def test_a_pack_of_internvl_leaves_when_it_is_full_in_one_of_two_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, on one rank after the other: samples 0, 2, 4 ... are the first's."""
    asked = question([4, 0, 3, 0, 2, 0, 3, 0], [50, 60, 40, 40, 30, 40, 60, 90])
    monkeypatch.setattr(Question, "shuffled", lambda _, things: list(things))
    # First rank: 0 (4 tiles) stays open; 2 opens another (7 tiles would be too many); 4 fills 0 to 6 tiles, and leaves;
    # 6 fills 2 to 6 tiles and 100 tokens, and leaves. Second: 1 and 3 are 100 tokens; 5 and 7 do not fit together.
    assert peer_orders.internvl_packed(asked) == [[[0, 4], [1, 3]], [[2, 6], [5]]]


def test_what_wrapped_cuts_is_counted() -> None:
    """Borders are at 100 and 200: in the text of the second sample, in the image of the third, behind the last."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed here")
    asked = question([1, 1, 9, 0], [60, 60, 110, 70])
    assert peer_orders.cut_by_wrapped(asked) == {"samples": 2, "images": 1}


def test_ours_keeps_both_budgets_and_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.VIT_BUDGET", 6)
    monkeypatch.setattr("benchmarks.peers.LLM_BUDGET", 100)
    random = np.random.default_rng(0)
    sizes = Sizes.from_arrays(random.integers(0, 4, 200), random.integers(40, 60, 200))
    costs = PackCosts({"vision": {"tiles": 3.0}, "language": {"tokens": 0.1}})
    steps = our_steps(sizes, costs, RANKS)
    packs = [pack for step in steps for pack in step]
    taken = [sample for pack in packs for sample in pack]
    assert len(set(taken)) == len(taken) > 190
    assert all(sizes.tiles[pack].sum() <= 6 and sizes.tokens[pack].sum() <= 100 for pack in packs)


def test_as_many_tokens_and_a_step_to_warm_up() -> None:
    sizes = Sizes.from_arrays(np.zeros(6, np.int64), np.array([10, 20, 30, 40, 50, 60]))
    steps = [[[number]] for number in range(6)]
    assert of_tokens(steps, sizes, 50) == steps[:3]  # 10 to warm up, then 20 and 30
    assert of_tokens(steps, sizes, 51) == steps[:4]


@pytest.mark.parametrize("name", ["Trainer, random", OURS])
def test_a_row_is_of_the_steps_between_the_first_and_the_held_out_one(name: str) -> None:
    sizes = Sizes.from_arrays(np.array([1, 2, 0, 1] * 2), np.array([300, 200, 250, 250] * 2))
    steps = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    cases = cases_of(name, steps, sizes, [[[0], [1]]])
    work = [[9.0, 9.0], [1.0, 3.0], [2.0, 1.0], [7.0, 7.0]]
    trained = [
        Trained([0.0], [seconds], [0.0, 0.0], [loss], [0.0]) for seconds, loss in zip(work, (4, 3, 2, 1), strict=True)
    ]
    row = row_of(name, cases, trained)
    padded = 2 * (2 * 300 + 2 * 250) if name != OURS else 2000
    assert row.padding == pytest.approx(1 - 2000 / padded)
    assert row.tokens_per_second == pytest.approx(2000 / (3 + 2))
    assert row.waiting == pytest.approx(1 - (2 + 1.5) / 5)
    assert (row.most_tiles, row.most_tokens) == (3, 600 if name != OURS else 500)
    assert row.loss == 1
