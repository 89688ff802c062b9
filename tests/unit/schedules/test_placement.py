"""Where stages sit, and lists on a V: the bubble is the filling of the pipe, and no rank holds more than it may."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.schedules.actions import check_packs
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.playing import in_slices
from omnibal_ext.schedules.program import check_schedule, compile_schedule
from omnibal_ext.schedules.schedule import build_schedule
from omnibal_ext.schedules.simulate import Simulation, simulate
from tests.unit.drawn import placements
from tests.unit.schedules.uniform import uniform


def test_the_two_placements_written_out() -> None:
    assert Placement.interleaved(3, 2).ranks_of == (0, 1, 2, 0, 1, 2)
    assert Placement.v_shaped(3, 2).ranks_of == (2, 1, 0, 0, 1, 2)
    assert Placement.v_shaped(2, 4).ranks_of == (1, 0, 0, 1, 1, 0, 0, 1)
    assert Placement.v_shaped(3, 1).ranks_of == Placement.interleaved(3).ranks_of == (0, 1, 2)
    for ranks, chunks in ((2, 2), (4, 2), (3, 4)):  # of a V only the turns stay within a rank
        handed_over = enumerate(pairwise(Placement.v_shaped(ranks, chunks).ranks_of))
        within = [stage for stage, (rank, other) in handed_over if rank == other]
        assert within == [ranks * way - 1 for way in range(1, chunks)]
    assert Placement.v_shaped(2, 2).by_rank([1.0, 2.0, 4.0, 8.0]).tolist() == [6.0, 9.0]
    assert Placement.v_shaped(2, 2).by_rank(np.eye(4)).tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]


@given(placements)
def test_every_stage_has_one_place_and_chunks_go_with_the_chain(placement: Placement) -> None:
    places = [placement.rank_and_chunk(stage) for stage in range(placement.stages)]
    assert sorted(places) == [(rank, chunk) for rank in range(placement.ranks) for chunk in range(placement.chunks)]
    for rank, stages in enumerate(placement.stages_of):
        assert stages == sorted(stages)
        assert [places[stage] for stage in stages] == [(rank, chunk) for chunk in range(placement.chunks)]
    assert places[-1][0] == placement.ranks - 1


@given(placements)
def test_what_crosses_has_an_edge_and_nothing_else_has(placement: Placement) -> None:
    assert set(placement.edges) == {pair for pair in pairwise(placement.ranks_of) if pair[0] != pair[1]}
    assert len(placement.edges) == len(set(placement.edges))
    assert all(source != target for source, target in placement.edges)


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


@given(placements, st.integers(1, 9), st.integers(1, 12), st.integers(0, 12))
def test_playing_ends_in_any_room_for_one_microbatch_and_stays_in_it(
    placement: Placement, microbatches: int, in_flight: int, more: int
) -> None:
    slices, ones = placement.chunks + more, [1.0] * placement.stages
    schedule = in_slices(placement, microbatches, slices, in_flight)
    check_schedule(schedule, microbatches, placement)
    check_packs(schedule, placement.chunks)
    costs = uniform(microbatches, ones, [2.0] * placement.stages, weight=ones, kept=ones, late=ones)
    assert simulate(compile_schedule(schedule, microbatches, placement), costs).peak_bytes.max() <= slices
