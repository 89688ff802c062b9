"""Cuts: equal layers are cut equally; each cut is the nearest to even; the paper's ranking is the paper's."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import layer_names
from omnibal_ext.errors import UserError
from omnibal_ext.layout.partition import bmp_candidates, cut_bytes, even_edges, layer_weights, spread_of
from omnibal_ext.layout.problem import LayoutProblem

from .instances import make_profile


@given(st.integers(1, 8), st.integers(1, 12), st.floats(1e-6, 1e6))
def test_equal_layers_are_cut_equally(stages: int, layers_each: int, weight: float) -> None:
    assert even_edges([weight] * (stages * layers_each), stages) == tuple(
        range(0, stages * layers_each + 1, layers_each)
    )


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


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="4 stages asked of a chain of 3 layers"):
        even_edges([1, 1, 1], 4)


def test_methods_weigh_layers_as_named() -> None:
    profile = make_profile(
        1, 1, parameters={"patch_embed": 1, "vit": 5, "projector": 2, "word_embed": 3, "llm": 9, "head": 3}
    )
    problem = LayoutProblem(profile, 1, 1)
    assert layer_weights(problem, "parameters").tolist() == [1, 5, 2, 3, 9, 3]
    assert layer_weights(problem, "layers").tolist() == [0, 1, 0, 0, 1, 0]
    assert layer_weights(problem, "profile").tolist() == [0.1, 1.0, 0.1, 0.1, 2.0, 0.1]


def test_parameters_missing_from_a_profile_are_named() -> None:
    with pytest.raises(UserError, match="layer patch_embed: the profile has no parameters"):
        layer_weights(LayoutProblem(make_profile(parameters={"vit": 1}), 1, 1), "parameters")


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
