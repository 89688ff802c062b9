"""Recomputation: the fewest layers that fit, with the microbatches truly in flight; shortfalls told in bytes."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.layout.partition import even_edges, layer_weights
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.recompute import fewest_that_fit, recompute_all

from .instances import make_profile, random_problem


def test_with_room_nothing_is_recomputed_and_kept_bytes_count_once_a_microbatch_in_flight() -> None:
    """ViT layers keep 8, LLM layers 6, others 1; weights 10 (LLM 20)."""
    problem = LayoutProblem(make_profile(2, 2), ranks=2, microbatches=4)
    layout = fewest_that_fit(problem, (0, 4, 8))
    assert layout.recompute == ((), ())
    assert problem.stage_peak_bytes(layout) == [40 + 2 * (1 + 8 + 8 + 1), 60 + 1 * (1 + 6 + 6 + 1)]
    one = replace(problem, microbatches=1)
    assert one.stage_peak_bytes(layout)[0] == 40 + 1 * 18


def test_tight_memory_recomputes_the_first_layers_of_the_stage_that_needs_it() -> None:
    problem = LayoutProblem(make_profile(2, 2), ranks=2, microbatches=4, memory_bytes=75.0)
    layout = fewest_that_fit(problem, (0, 4, 8))
    assert layout.recompute == ((1,), ())
    assert problem.stage_peak_bytes(layout)[0] == 40 + 2 * (1 + 1 + 8 + 1)


@given(st.integers(0, 10**6))
@example(38)  # the kinds save unlike many bytes, and either would do
@example(75)
def test_fewest_that_fit_is_the_fewest_of_all_for_one_stage_a_rank(seed: int) -> None:
    problem = random_problem(seed, chunks=1)
    edges = even_edges(layer_weights(problem, "profile"), problem.stages)
    try:
        layout = fewest_that_fit(problem, edges)
    except UserError:
        assert max(problem.stage_peak_bytes(recompute_all(replace(problem, memory_bytes=np.inf), edges))) > (
            problem.memory_bytes
        )
        return
    assert max(problem.stage_peak_bytes(layout)) <= problem.memory_bytes
    held, again = problem.counts(layout)
    saved = problem.tables.saved
    for rank in range(problem.ranks):
        chosen = (again[rank].sum(), -again[rank] @ saved)
        assert not again[rank] @ ~problem.whole, "whole layers are counted"
        better = (  # fewer, or as many that save more
            counts
            for counts in product(*(range(n + 1) for n in held[rank, problem.kind_of_option] * problem.whole))
            if (sum(counts), -np.array(counts) @ saved + 1e-9) < chosen
        )
        assert all(
            problem.rank_bytes(rank, held[[rank]], np.array([counts])) > problem.memory_bytes for counts in better
        )


def test_a_shortfall_names_stage_bytes_and_remedy() -> None:
    problem = LayoutProblem(make_profile(2, 2), ranks=2, microbatches=4, memory_bytes=50.0)
    with pytest.raises(UserError, match=r"pipeline rank 1 needs .*, 19 bytes .* over the limit .*weights alone"):
        fewest_that_fit(problem, (0, 4, 8))


def test_of_several_chunks_the_layer_goes_first_that_saves_most_bytes_in_flight() -> None:
    """A language layer saves more, but fewer microbatches of its chunk are in flight."""
    profile = make_profile(
        4, 4, {"llm": replace(make_profile().layers["llm"], kept_bytes=10.0, recompute_kept_bytes=2.0)}
    )
    problem = LayoutProblem(profile, ranks=2, microbatches=4, chunks=2)
    in_flight, edges = problem.held[0].max(axis=0), (0, 3, 6, 9, 12)  # patches and two ViT layers, words and two of LLM
    assert in_flight[0] * 7 > in_flight[1] * 8
    (needed, _) = problem.stage_peak_bytes(fewest_that_fit(problem, edges))
    assert fewest_that_fit(replace(problem, memory_bytes=needed), edges).recompute == ((), (), (), ())
    assert fewest_that_fit(replace(problem, memory_bytes=needed - 1), edges).recompute == ((1,), (), (), ())


@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe", "zb_h1"]))
def test_promised_bytes_are_never_below_those_of_any_schedule_and_chunks(seed: int, schedule: str) -> None:
    problem = replace(random_problem(seed, schedule_name=schedule), packs=None, memory_bytes=np.inf)
    edges = even_edges(layer_weights(problem, "layers"), problem.stages)
    kept, again = fewest_that_fit(problem, edges), recompute_all(problem, edges)
    assert problem.simulate(kept).peak_bytes.tolist() == pytest.approx(problem.stage_peak_bytes(kept))
    promised = np.array(problem.stage_peak_bytes(again))
    assert (problem.simulate(again).peak_bytes <= promised * (1 + 1e-9)).all()
