"""Cuts: equal layers are cut equally, each cut is the nearest to even. Recomputation: the fewest layers that fit, with
the microbatches truly in flight.
"""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import layer_names
from omnibal_ext.errors import UserError
from omnibal_ext.layout.partition import bmp_candidates, cut_bytes, even_edges, layer_weights, spread_of
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.recompute import fewest_that_fit, recompute_all

from .instances import make_profile, random_problem


@given(st.integers(1, 8), st.integers(1, 12), st.floats(1e-6, 1e6))
def test_equal_layers_are_cut_equally(stages: int, each: int, weight: float) -> None:
    assert even_edges([weight] * (stages * each), stages) == tuple(range(0, stages * each + 1, each))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.data())
def test_each_cut_is_within_half_a_layer_of_even(weights: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    edges = even_edges(weights, stages)
    assert len(edges) == stages + 1
    assert all(first < end for first, end in pairwise(edges))
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    for s in range(1, stages):
        others = range(edges[s - 1] + 1, len(weights) - (stages - s) + 1)
        target = prefix[-1] * s / stages
        assert abs(prefix[edges[s]] - target) == min(abs(prefix[e] - target) for e in others)


def test_methods_weigh_layers_as_named() -> None:
    sizes = {"patch_embed": 1, "vit": 5, "projector": 2, "word_embed": 3, "llm": 9, "head": 3}
    problem = LayoutProblem(make_profile(1, 1, parameters=sizes), 1, 1)
    assert layer_weights(problem, "parameters").tolist() == [1, 5, 2, 3, 9, 3]
    assert layer_weights(problem, "layers").tolist() == [0, 1, 0, 0, 1, 0]
    assert layer_weights(problem, "profile").tolist() == [0.1, 1.0, 0.1, 0.1, 2.0, 0.1]
    with pytest.raises(UserError, match="layer patch_embed: the profile has no parameters"):
        layer_weights(LayoutProblem(make_profile(parameters={"vit": 1}), 1, 1), "parameters")
    with pytest.raises(UserError, match="4 stages asked of a chain of 3 layers"):
        even_edges([1, 1, 1], 4)


def test_the_parameter_cut_of_6b_20b_is_the_published_one() -> None:
    """REFERENCE section 1: 45 ViT | 17 | 16 | 15 LLM layers."""
    chain = preset("internvl-chat-1.5").chain
    vit, llm = 12 * 3200**2, 2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16384
    word, projector = 92553 * 6144, 12800 * 6144 + 6144**2
    sizes = {
        "patch_embed": 588 * 3200, "vit": vit, "projector": projector, "word_embed": word, "llm": llm, "head": word,
    }  # fmt: skip
    edges = even_edges([sizes[kind] for kind in chain], 4)
    kinds = [[chain[i] for i in range(first, end)] for first, end in pairwise(edges)]
    assert [stage.count("vit") for stage in kinds] == [45, 0, 0, 0]
    assert [stage.count("llm") for stage in kinds] == [0, 17, 16, 15]
    assert layer_names(chain)[edges[1]] in ("projector", "word_embed", "llm.0")


@given(st.integers(2, 4), st.integers(0, 2), st.integers(1, 40))
def test_candidates_are_the_best_of_the_neighbourhood_in_order(stages: int, radius: int, top_k: int) -> None:
    profile = make_profile(4, 3)
    problem = LayoutProblem(profile, stages, 1)
    forward, carried = layer_weights(problem, "profile"), cut_bytes(profile)
    anchor = even_edges(forward, stages)

    def score(edges: tuple[int, ...]) -> float:
        def volume(e: tuple[int, ...]) -> float:
            return float(sum(carried[i - 1] for i in e[1:-1]))

        spread = max(spread_of(forward, anchor), 1e-4 * (forward.sum() / stages) ** 2)
        return spread_of(forward, edges) / spread + volume(edges) / volume(anchor)

    moves = product(range(-radius, radius + 1), repeat=stages - 1)
    near = [(0, *(a + m for a, m in zip(anchor[1:-1], move, strict=True)), forward.size) for move in moves]
    near = [edges for edges in near if all(first < end for first, end in pairwise(edges))]
    found = bmp_candidates(problem, radius, top_k)
    assert len(found) == len(set(found)) == min(top_k, len(near))
    assert set(found) <= set(near)
    assert [score(e) for e in found] == pytest.approx(sorted(map(score, near))[:top_k])


def test_what_is_recomputed_with_room_and_without() -> None:
    """ViT layers keep 8, LLM layers 6, others 1, once a microbatch in flight; weights 10 (LLM 20). With room nothing is
    recomputed, where it is tight the first layers of the stage that needs it."""
    problem = LayoutProblem(make_profile(2, 2), ranks=2, microbatches=4)
    layout = fewest_that_fit(problem, (0, 4, 8))
    assert layout.recompute == ((), ())
    assert problem.stage_peak_bytes(layout) == [40 + 2 * (1 + 8 + 8 + 1), 60 + 1 * (1 + 6 + 6 + 1)]
    assert replace(problem, microbatches=1).stage_peak_bytes(layout)[0] == 40 + 1 * 18
    layout = fewest_that_fit(replace(problem, memory_bytes=75.0), (0, 4, 8))
    assert layout.recompute == ((1,), ())
    assert problem.stage_peak_bytes(layout)[0] == 40 + 2 * (1 + 1 + 8 + 1)
    with pytest.raises(UserError, match=r"pipeline rank 1 needs .*, 19 bytes .* over the limit .*weights alone"):
        fewest_that_fit(replace(problem, memory_bytes=50.0), (0, 4, 8))


@given(st.integers(0, 10**6))
@example(38)  # the kinds save unlike many bytes, and either would do
@example(75)
def test_fewest_that_fit_is_the_fewest_of_all_for_one_stage_a_rank(seed: int) -> None:
    problem = random_problem(seed, chunks=1)
    edges = even_edges(layer_weights(problem, "profile"), problem.stages)
    try:
        layout = fewest_that_fit(problem, edges)
    except UserError:
        least = problem.stage_peak_bytes(recompute_all(replace(problem, memory_bytes=np.inf), edges))
        assert max(least) > problem.memory_bytes
        return
    assert max(problem.stage_peak_bytes(layout)) <= problem.memory_bytes
    held, recomputed = problem.counts(layout)
    saved = problem.tables.saved
    for rank in range(problem.ranks):
        chosen = (recomputed[rank].sum(), -recomputed[rank] @ saved)
        assert not recomputed[rank] @ ~problem.columns.whole, "whole layers are counted"
        for counts in product(*(range(n + 1) for n in held[rank, problem.columns.of_option] * problem.columns.whole)):
            if (sum(counts), -np.array(counts) @ saved + 1e-9) < chosen:  # fewer, or as many that save more
                assert problem.rank_bytes(rank, held[[rank]], np.array([counts])) > problem.memory_bytes


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
