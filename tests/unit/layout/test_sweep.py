"""The sweep uses all GPUs and ranks by samples a second, on packs of an index in the order training runs them."""

from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout import sweep as sweep_module
from omnibal_ext.layout import workload
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.sweep import Setting, _noise, judge_setting, settings, sweep
from omnibal_ext.layout.workload import pack_corpus, packs_of_index, packs_of_loads
from omnibal_ext.packing import pack_epoch
from omnibal_ext.packing import twins as twins_module
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packers.budgets import further_budgets_for
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import mix

from .instances import make_profile


def _profile(vit: int, llm: int, tensor: int, data: int, _: int) -> Profile:
    return analytic_profile(preset("internvl-chat-1.5"), "a100", {"tiles": vit, "tokens": llm}, tensor, data)


def test_settings_use_every_gpu_once() -> None:
    points = list(settings(8, (1, 2, 3), (1, 2, 4), (1, 2), ("1f1b", "zb_h1"), ((9, 4096),)))
    sizes = [(p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size) for p in points]
    assert set(map(prod, sizes)) == {8}
    assert len(points) == len(set(points)) == 2 * (1 + 4 + 4)


def test_experts_are_dealt_over_what_divides_the_ranks_of_a_stage() -> None:
    points = list(settings(8, (1, 2), (1, 4), (1,), ("1f1b",), ((9, 4096),), (1, 2, 8)))
    dealt = {(p.pipeline_model_parallel_size, p.expert_model_parallel_size) for p in points}
    assert dealt == {(1, 1), (1, 2), (1, 8), (4, 1), (4, 2)}
    together = settings(8, (4,), (1,), (1,), ("1f1b",), ((9, 4096),), (8,))  # of two data-parallel ranks of four each
    assert [p.expert_model_parallel_size for p in together] == [8]


@pytest.mark.slow
def test_outcomes_are_ranked_and_misfits_say_why() -> None:
    random = np.random.default_rng(0)
    sizes = Sizes.from_arrays(random.integers(1, 5, 600), random.integers(1100, 1600, 600))
    points = settings(32, (1, 2), (4,), (1,), ("1f1b", "zb_h1"), ((9, 4096),))
    outcomes = sweep(points, sizes, 64, 80e9, _profile, seconds=0.05)
    speeds = [o.samples_per_second for o in outcomes]
    assert len(outcomes) == 4
    assert speeds == sorted(speeds, reverse=True)
    assert all(o.reason if o.problem is None else 0 < o.fraction_of_ideal < 1 for o in outcomes)
    assert any("over the limit" in o.reason for o in outcomes)
    best = outcomes[0]
    assert best.problem is not None
    assert best.judged is not None
    everything = replace(best.problem, packs=best.judged.packs)
    assert best.step_seconds == pytest.approx(everything.step_seconds(best.candidates[0].layout))
    assert best.samples_per_second == pytest.approx(64 / best.step_seconds, rel=0.1)
    assert best.noise == 0  # all iterations of this small corpus were judged


def test_the_budget_of_mel_frames_follows_each_budget_of_tokens_unless_given() -> None:
    sizes, tried = mix(300), {}
    frames, tokens = sizes.more["frames"], sizes.tokens
    usual = {llm: max(1.25 * llm * frames.sum() / tokens.sum() + 1, frames.max()) for llm in (6000, 12000)}
    points = list(settings(2, (1,), (2,), (1,), ("1f1b",), ((5600, 6000), (20000, 12000))))

    def source(vit: int, llm: int, tensor: int, data: int, _: int) -> Profile:
        budgets = {"tiles": vit, "tokens": llm, **further_budgets_for(sizes, llm)}
        return analytic_profile(preset("qwen2.5-omni-3b"), "h100", budgets, tensor, data)

    for given in (None, int(frames.max())):
        for outcome in sweep(points, sizes, 48, 80e9, source, "parameters", further=given and {"frames": given}):
            assert outcome.judged is not None, outcome.reason
            assert outcome.judged.packs.more
            tried[given, outcome.setting.llm_budget] = int(outcome.judged.packs.of("frames").max())
    assert tried[None, 6000] <= usual[6000] < tried[None, 12000] <= usual[12000]
    assert tried[frames.max(), 12000] <= frames.max() < tried[None, 12000]


@pytest.mark.parametrize(("method", "made"), [("balanced", 2), ("isf", 2), ("random", 2), ("device_group", 8)])
@pytest.mark.parametrize("twins", [False, True])
def test_packs_made_once_are_those_made_anew(
    monkeypatch: pytest.MonkeyPatch, method: str, made: int, twins: bool
) -> None:
    """For all ranks and microbatches; of a device group, packs are for its ranks. Two budgets are two packings."""
    if twins:
        monkeypatch.setattr(pack_epoch, "MANY", 60)
        monkeypatch.setattr(twins_module, "LONGER", 0.5)
    random, calls = np.random.default_rng(0), []
    tiles = random.choice([0, 1, 3, 7], 2_000)
    sizes = Sizes.from_arrays(tiles, 256 * tiles + random.integers(10, 800, 2_000))
    monkeypatch.setattr(workload, "pack", lambda *asked: calls.append(asked) or pack_epoch.pack(*asked))
    make = workload.packed_once()
    for llm, ranks, microbatches in product((4096, 3000), (1, 4), (1, 6)):
        options = PackOptions(method, 9, llm, micro_batches=microbatches, data_parallel_size=ranks, seconds=0.01)
        shared, alone = pack_corpus(sizes, options, make), pack_corpus(sizes, options)
        for name in ("loads", "needed", "samples", "iterations"):
            assert np.array_equal(getattr(shared, name), getattr(alone, name)), name
    assert len(calls) == made if not twins or method != "balanced" else len(calls) < 16


@pytest.mark.parametrize("many", [1 << 16, 60])
def test_microbatches_are_those_of_packs_in_their_order(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """As many as hold the samples, also where packs beyond `MANY` are those of twins."""
    for module in (pack_epoch, sweep_module):
        monkeypatch.setattr(module, "MANY", many)
    monkeypatch.setattr(twins_module, "LONGER", 0.5)
    random = np.random.default_rng(0)
    tiles = random.choice([0, 1, 3, 7], 2_000)
    sizes = Sizes.from_arrays(tiles, 256 * tiles + random.integers(10, 800, 2_000))
    a_pack = pack_corpus(sizes, PackOptions("balanced", 9, 4096, micro_batches=8)).samples.mean()
    for batch in (20, 85, 190):
        (outcome,) = sweep([Setting(1, 2, 2, 1, "1f1b", 9, 4096)], sizes, batch, 1e12, _profile, "parameters")
        assert outcome.problem is not None, outcome.reason
        assert outcome.problem.microbatches == max(1, round(batch / a_pack / 2))


@pytest.mark.parametrize("seed", range(3))
def test_the_noise_is_how_far_samples_a_second_lie_from_those_of_the_whole_epoch(seed: int) -> None:
    """The standard error against the spread of many draws without putting back."""
    random = np.random.default_rng(seed)
    seconds = random.normal(1.0, 0.1, 400)
    draws = [seconds[random.choice(400, 100, replace=False)] for _ in range(2000)]
    spread = np.std([1 / drawn.mean() for drawn in draws]) * seconds.mean()
    assert np.mean([_noise(drawn, 400) for drawn in draws[:200]]) == pytest.approx(spread, rel=0.1)
    assert _noise(seconds, 400) == 0


@pytest.mark.parametrize(("method", "few"), [("balanced", True), ("isf", False)])
def test_as_many_iterations_are_judged_as_the_noise_asks_for(method: str, few: bool) -> None:
    """Balanced iterations take hardly longer than each other."""
    random = np.random.default_rng(0)
    tiles = random.choice([1, 3, 7], 8_000)
    sizes = Sizes.from_arrays(tiles, 256 * tiles + random.integers(10, 800, 8_000))
    options = PackOptions(method, 9, 4096, micro_batches=2, data_parallel_size=2)
    corpus = pack_corpus(sizes, options)
    point = Setting(2, 2, 2, 1, "1f1b", corpus.vit_budget, corpus.llm_budget)
    outcome = judge_setting(point, _profile(corpus.vit_budget, corpus.llm_budget, 2, 2, 1), corpus, 1e12, "profile")
    assert outcome.judged is not None
    assert (len(outcome.judged.packs.tiles) == 32) == few
    assert outcome.noise <= 0.003


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
    found = [size.tolist() for size in (packs.tiles, packs.tokens, packs.squares)]
    assert found == [[[[3, 0]]], [[[5, 0]]], [[[25, 0]]]]


def test_other_microbatches_and_larger_budgets_are_refused(index: PackedIndex) -> None:
    with pytest.raises(UserError, match="--num-microbatches 4 does not divide"):
        packs_of_index(index, make_profile(), 4)
    for budget, packed, less in (("vit_budget", 4, 2), ("llm_budget", 128, 127)):
        with pytest.raises(UserError, match=f"packed for {budget} {packed}, but profiled at {less}"):
            packs_of_index(index, Profile.from_record({**make_profile().to_record(), budget: less}), 3)


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
