"""Lists on a V: the bubble that is left is the filling of the pipe, and no rank holds more than it may."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.schedules.actions import Schedule, check_packs
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.playing import Loads, played
from omnibal_ext.schedules.program import check_schedule, compile_schedule
from omnibal_ext.schedules.schedule import build_schedule
from omnibal_ext.schedules.simulate import Simulation, simulate
from tests.unit.drawn import placements
from tests.unit.schedules.uniform import uniform


def _of_equal_parts(name: str, p: int, m: int, v: int) -> tuple[float, float]:
    """Seconds that ranks wait where F, B and W take a second of a whole microbatch; the most microbatches held."""
    parts, placement = [1.0 / v] * p * v, Placement.v_shaped(p, v)
    costs = uniform(m, parts, [2.0 / v] * p * v, weight=parts, kept=parts, late=parts)
    found: Simulation = simulate(compile_schedule(build_schedule(name, p, m, v), m, placement), costs)
    return found.step_seconds - 3 * m, float(found.peak_bytes.max())


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (4, 4), (6, 2), (8, 2), (8, 4)])
def test_zb_v_waits_only_for_the_pipe_to_fill_in_the_bytes_of_1f1b(ranks: int, chunks: int) -> None:
    """Qi et al. 2024: no bubble behind the (ranks - 1) / chunks in which the first microbatch comes."""
    bubble, held = _of_equal_parts("zb_v", ranks, 3 * ranks, chunks)
    assert bubble == pytest.approx((ranks - 1) / chunks)
    assert held <= ranks


@pytest.mark.parametrize("ranks", [4, 6, 8, 16])
def test_half_and_a_third_of_the_bytes(ranks: int) -> None:
    """Of 1F1B's first rank; the bubble is about its 2 (ranks - 1) at most, and does not grow with the microbatches."""
    half, third = (_of_equal_parts(name, ranks, 3 * ranks, 2) for name in ("v_half", "v_min"))
    assert half[1] <= ranks / 2 + 1
    assert third[1] <= ranks / 3 + 1.4
    assert max(half[0], third[0]) < 2.2 * (ranks - 1)
    assert _of_equal_parts("v_min", ranks, 9 * ranks, 2)[0] == pytest.approx(third[0])


@given(placements, st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**31))
def test_playing_ends_in_any_room_for_one_microbatch_and_stays_in_it(
    placement: Placement, microbatches: int, in_flight: int, seed: int
) -> None:
    random = Random(seed)
    kept, late = ([random.uniform(0.1, 1) for _ in range(placement.stages)] for _ in "kl")
    late = [min(one) for one in zip(kept, late, strict=True)]
    seconds = {kind: [random.uniform(0.1, 1) for _ in range(placement.stages)] for kind in "FBW"}
    room = [random.uniform(1, 3) * sum(kept[s] for s in stages) for stages in placement.stages_of]
    schedule = played(placement, microbatches, Loads(seconds, kept, late, room), in_flight)
    assert schedule is not None
    check_schedule(schedule, microbatches, placement)
    check_packs(schedule, placement.chunks)
    backward = [b + w for b, w in zip(seconds["B"], seconds["W"], strict=True)]
    costs = uniform(microbatches, seconds["F"], backward, weight=seconds["W"], kept=kept, late=late)
    peaks = simulate(compile_schedule(schedule, microbatches, placement), costs).peak_bytes
    assert all(peak <= most * (1 + 1e-6) for peak, most in zip(peaks, room, strict=True))
    tight = [0.9 * sum(kept[s] for s in stages) for stages in placement.stages_of]
    assert played(placement, microbatches, Loads(seconds, kept, late, tight), in_flight) is None


def waves(ranks: int, microbatches: int, count: int) -> tuple[Placement, Schedule]:
    """Hanayo (Liu et al. 2023): a chain that goes down and up the ranks `count` times, forwards and whole backwards as
    they come."""
    placement = Placement.v_shaped(ranks, 2 * count)
    ones, nothing = [1.0] * placement.stages, [0.0] * placement.stages
    loads = Loads(
        {"F": ones, "B": [2.0] * placement.stages, "W": nothing}, ones, nothing, [float(placement.stages)] * ranks
    )
    lists = played(placement, microbatches, loads, microbatches)
    assert lists is not None
    return placement, [[action for action in actions if action.kind != "W"] for actions in lists]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_schedule_from_elsewhere_is_one_function(ranks: int, count: int) -> None:
    """Ranks of Hanayo wait for about four forwards of a stage for each other rank, however many waves there are, where
    those of 1F1B wait for three of 2 x waves stages: so the bubble is divided by the waves."""
    placement, lists = waves(ranks, ranks, count)
    check_packs(lists, placement.chunks)
    parts = [1.0] * placement.stages
    found = simulate(compile_schedule(lists, ranks, placement), uniform(ranks, parts, [2.0] * placement.stages))
    waits = found.step_seconds - 3 * ranks * placement.chunks
    assert 4 * (ranks - 1) - 1e-9 <= waits <= 4 * (ranks - 1) + 2
