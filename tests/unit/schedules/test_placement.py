"""Where stages sit: every rank has as many, the chain ends on the last rank, a V turns within a rank."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from omnibal_ext.schedules.placement import Placement
from tests.unit.drawn import placements


def test_the_two_placements_written_out() -> None:
    assert Placement.interleaved(3, 2).ranks_of == (0, 1, 2, 0, 1, 2)
    assert Placement.v_shaped(3, 2).ranks_of == (2, 1, 0, 0, 1, 2)
    assert Placement.v_shaped(2, 4).ranks_of == (1, 0, 0, 1, 1, 0, 0, 1)
    assert Placement.v_shaped(3, 1).ranks_of == Placement.interleaved(3).ranks_of == (0, 1, 2)


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


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (3, 4)])
def test_of_a_v_only_the_turns_stay_within_a_rank(ranks: int, chunks: int) -> None:
    handed_over = list(pairwise(Placement.v_shaped(ranks, chunks).ranks_of))
    within = [stage for stage, (rank, other) in enumerate(handed_over) if rank == other]
    assert within == [ranks * way - 1 for way in range(1, chunks)]


def test_sums_of_ranks() -> None:
    assert Placement.v_shaped(2, 2).by_rank([1.0, 2.0, 4.0, 8.0]).tolist() == [6.0, 9.0]
    assert Placement.v_shaped(2, 2).by_rank(np.eye(4)).tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
