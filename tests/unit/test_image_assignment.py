"""Images assigned to the ranks of a replica: once each, level, by the pack, the microbatch and the plan alone."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from omnibal_ext.image_assignment import assign_pieces, piece_costs


def loads(units: list[float], workers: tuple[int, ...], count: int) -> list[float]:
    return [sum(cost for cost, one in zip(units, workers, strict=True) if one == worker) for worker in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_no_worker_has_more_than_grahams_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    units = generator.integers(1, 40, generator.integers(1, 8)).tolist()
    ranks, tensor = tuple(range(int(generator.integers(1, 3)))), int(generator.integers(1, 3))
    count = len(ranks) * tensor
    workers = assign_pieces(units, seed, ranks, tensor)
    assert len(workers) == len(units)
    assert set(workers) <= set(range(count))
    best = min(max(loads(units, way, count)) for way in product(range(count), repeat=len(units)))
    assert max(loads(units, workers, count)) <= (4 / 3 - 1 / (3 * count)) * best + 1e-9


@pytest.mark.parametrize(("tiles", "ranks", "tensor"), [(1, 4, 1), (5, 4, 2), (24, 4, 1), (27, 3, 2)])
def test_tiles_lie_level_and_in_one_piece(tiles: int, ranks: int, tensor: int) -> None:
    workers = assign_pieces([1] * tiles, 3, tuple(range(ranks)), tensor)
    counts = Counter(workers)
    assert {counts[worker] for worker in range(ranks * tensor)} <= {
        tiles // (ranks * tensor),
        -(-tiles // (ranks * tensor)),
    }
    assert sum(one != other for one, other in pairwise(workers)) == len(counts) - 1


def test_leftovers_go_round() -> None:
    """Five tiles of each of eight microbatches over eight workers: each worker has five."""
    workers = Counter(worker for m in range(8) for worker in assign_pieces([1] * 5, m, (0, 1, 2, 3), 2))
    assert workers == Counter(dict.fromkeys(range(8), 5))


def test_sounds_are_assigned_with_images_by_what_they_cost() -> None:
    """A mel frame takes half as long as a tile: sounds of 16 and 6 frames beside images of 8, 3 and 5 tiles."""
    units, rates = {"tiles": ((8,), (3,), (5,)), "frames": ((10, 6), (), (6,))}, {"tiles": 1.0, "frames": 0.5}
    costs = piece_costs(units, rates)
    assert costs == (8, 3, 5, 8.0, 0.0, 3.0)
    workers = assign_pieces(costs, 0, (0, 1, 2), 1)
    assert sorted(loads([*costs], workers, 3)) == [8, 8, 11]
    assert piece_costs({"tiles": units["tiles"]}, rates) == (8, 3, 5)


def test_a_pack_without_images_has_no_units_to_assign() -> None:
    assert assign_pieces([], 2, (0, 1), 2) == ()
