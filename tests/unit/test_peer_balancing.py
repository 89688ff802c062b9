"""LoongForge's levelling, written anew: by hand, and what it keeps whatever the samples."""

import numpy as np
import pytest

from benchmarks.peer_balancing import MOST_TOKENS, TRIGGER, levelled, loads_of


def sums(packs: list, values: np.ndarray) -> list[float]:
    return [float(values[list(pack)].sum()) for pack in packs]


def test_dearest_samples_go_first_to_who_has_least() -> None:
    """By hand: 8, 7 to a rank each, 6 to the second, 5 to the first, 4 to either, 1 to the other."""
    loads = np.array([8.0, 7.0, 6.0, 5.0, 4.0, 1.0])
    packs = levelled([[0, 1, 2], [3, 4, 5]], loads, np.full(6, 10))
    assert sorted(sums(packs, loads)) == [14.0, 17.0]  # 20% apart, and no exchange levels more
    assert sorted(map(sorted, packs)) == [[0, 3, 4], [1, 2, 5]]


def test_the_slowest_gives_the_quickest_its_dearest_sample_if_tokens_have_room() -> None:
    """By hand: with 120 tokens at most, 4 and 3 find no room beside 5 and go to 6; then 6 goes to 5."""
    loads, tokens = np.array([6.0, 5.0, 4.0, 3.0]), np.array([10, 90, 40, 60])
    packs = levelled([[0, 1, 2], [3]], loads, tokens)
    assert sorted(map(sorted, packs)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(4))
def test_no_sample_is_lost_tokens_are_kept_to_and_the_slowest_is_quicker(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(20, 400, 320)
    loads = tokens**2 + 50.0 * tokens
    step = [part.tolist() for part in np.array_split(random.permutation(320), 32)]
    packs = levelled(step, loads, tokens)
    assert sorted(sample for pack in packs for sample in pack) == list(range(320))
    assert max(sums(packs, tokens)) <= MOST_TOKENS * tokens.sum() / 32
    assert max(sums(packs, loads)) < 1.1 * loads.sum() / 32 < max(sums(step, loads)) / TRIGGER


@pytest.mark.parametrize("loads", [[1.0, 1.1, 1.0, 1.1], [9.0, 1.0, 1.0, 1.0]])
def test_steps_are_left_alone_if_level_or_if_one_sample_is_more_than_a_rank_has(loads: list[float]) -> None:
    step = [[0, 2], [1, 3]]
    assert levelled(step, np.array(loads), np.full(4, 5)) is step


@pytest.mark.parametrize("seed", range(3))
def test_what_samples_take_is_found_from_packs(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(10, 3000, 200)
    known = 2e-9 * tokens**2 + 3e-6 * tokens + 4e-4
    steps = [[random.choice(200, 5).tolist() for _ in range(8)] for _ in range(12)]
    seconds = np.array([sums(step, known) for step in steps])
    assert loads_of(steps, seconds, tokens) == pytest.approx(known, rel=1e-6)
