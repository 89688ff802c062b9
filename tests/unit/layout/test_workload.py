"""Packs of an index reach the planner in the order training runs them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.workload import pack_corpus, packs_of_index, packs_of_loads
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

from .instances import make_profile


@pytest.fixture
def index(tmp_path: Path) -> PackedIndex:
    random = np.random.default_rng(0)
    sizes = Sizes.from_arrays(random.integers(0, 4, 200), random.integers(1, 60, 200))
    options = PackOptions("isf", 4, 128, micro_batches=3, data_parallel_size=2)
    return build_index(sizes, tmp_path / "index", options)[0]


def test_packs_are_those_the_stream_runs(index: PackedIndex) -> None:
    packs = packs_of_index(index, make_profile(), 3, iterations=2)
    stream = PackStream(index, 2, 3)
    first, last = (stream.iteration(stream.iterations_per_epoch * part // 4) for part in (1, 3))
    assert packs.tiles.shape == (2, 2, 3)
    assert packs.tokens[0].tolist() == index.loads[first, 1].tolist()
    assert packs.squares[1].tolist() == index.loads[last, 2].tolist()


def test_empty_packs_cost_nothing() -> None:
    packs = packs_of_loads(np.array([[1, 2, 4], [3, 5, 25]]), np.array([[[1, -1]]]))
    assert (packs.tiles.tolist(), packs.tokens.tolist(), packs.squares.tolist()) == (
        [[[3, 0]]],
        [[[5, 0]]],
        [[[25, 0]]],
    )


def test_other_microbatches_and_larger_budgets_are_refused(index: PackedIndex) -> None:
    with pytest.raises(UserError, match="--num-microbatches 4 does not divide"):
        packs_of_index(index, make_profile(), 4)
    with pytest.raises(UserError, match="packed for vit_budget 4, but profiled at 2"):
        packs_of_index(index, replace(make_profile(), vit_budget=2), 3)
    with pytest.raises(UserError, match="packed for llm_budget 128, but profiled at 127"):
        packs_of_index(index, replace(make_profile(), llm_budget=127), 3)


def test_step_time_is_the_mean_over_iterations_of_the_slowest_rank(index: PackedIndex) -> None:
    packs = packs_of_index(index, make_profile(), 3, iterations=3)
    problem = LayoutProblem(make_profile(), 2, 3, packs=packs)
    layout = find_layouts(problem, "profile")[0].layout
    cases = np.array([problem.simulate(layout, case).step_seconds for case in range(6)]).reshape(3, 2)
    assert problem.step_seconds(layout) == pytest.approx(cases.max(axis=1).mean())


def test_padding_runs_but_is_not_needed() -> None:
    random = np.random.default_rng(0)
    sizes = Sizes.from_arrays(random.integers(0, 4, 240), random.integers(1, 60, 240))
    options = PackOptions("random", 4, 128, micro_batches=3, data_parallel_size=2, samples_per_pack=4)
    corpus = pack_corpus(sizes, options)
    work = corpus.workload(10)
    assert (work.packs.tokens.shape, corpus.mean_samples) == ((10, 2, 3), 24)
    assert work.needed.tokens.sum() == sizes.tokens.sum()  # ten iterations are all there are
    assert work.needed.squares.sum() == (sizes.tokens**2).sum()
    assert (work.packs.tokens >= work.needed.tokens).all()
    assert work.packs.tokens.sum() > 1.2 * work.needed.tokens.sum()


def test_iterations_are_taken_out_of_equal_parts_of_the_epoch() -> None:
    """Forty iterations of one pack of one sample of its own length: the middle ones of four times ten."""
    sizes = Sizes.from_arrays(np.zeros(40, dtype=np.int64), np.arange(65, 105))
    corpus = pack_corpus(sizes, PackOptions("balanced", 0, 128))
    order = corpus.loads[corpus.iterations, 1].ravel()
    assert sorted(order) == list(range(65, 105))
    assert corpus.workload(4).packs.tokens.ravel().tolist() == order[[5, 15, 25, 35]].tolist()
    assert corpus.workload(100).packs.tokens.ravel().tolist() == order.tolist()
