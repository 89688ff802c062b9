"""Methods give plans that fit and hold every layer once; what plan.json predicts, and what is printed of it, is
reckoned once more from the played schedule.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import LayerCost
from omnibal_ext.errors import UserError
from omnibal_ext.layout.command import print_plan
from omnibal_ext.layout.partition import even_edges
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import METHODS, Candidate, find_layouts, make_plan, predictions
from omnibal_ext.layout.tables import Columns, columns_of, kind_tables
from omnibal_ext.report.timeline import layout_of
from omnibal_ext.trained import Trained
from omnibal_ext.units import GIB

from .instances import make_profile, random_problem

PREDICTED = {
    "step_seconds", "bubble_fraction", "ideal_seconds", "fraction_of_ideal", "stage_seconds", "stage_forward_seconds",
    "stage_backward_seconds", "stage_peak_bytes", "stage_limit",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_predictions_are_of_the_played_schedule(seed: int) -> None:
    problem = random_problem(seed, memory_bytes=float("inf"))
    layout = find_layouts(problem, "profile")[0].layout
    found, (iterations, replicas) = predictions(problem, layout), problem.cases
    steps, bubbles, forward, backward = [], [], [], []
    for case in range(iterations * replicas):
        play, costs = problem.simulate(layout, case), problem.stage_costs(layout, case)
        lanes = [play.timeline(rank) for rank in range(problem.ranks)]
        own = [[s for s in range(problem.stages) if problem.placement.ranks_of[s] == r] for r in range(problem.ranks)]
        ends = [lane[-1][2] + sum(costs.step[s] for s in own[rank]) for rank, lane in enumerate(lanes)]
        work = sum(end - start for lane in lanes for _, start, end in lane)
        steps.append(max(ends))
        bubbles.append(1 - work / (problem.ranks * max(lane[-1][2] for lane in lanes)))
        forward.append([sum(row) / problem.microbatches for row in costs.forward.tolist()])
        backward.append([sum(row) / problem.microbatches for row in costs.backward.tolist()])
    held = replace(problem, packs=None).simulate(layout).peak_bytes.tolist()
    assert found["stage_peak_bytes"] == pytest.approx(held), "the most of full packs"
    slowest = [max(steps[i * replicas : (i + 1) * replicas]) for i in range(iterations)]
    assert found["step_seconds"] == pytest.approx(sum(slowest) / iterations)
    assert found["bubble_fraction"] == pytest.approx(sum(bubbles) / len(bubbles))
    assert found["stage_forward_seconds"] == pytest.approx(np.mean(forward, axis=0).tolist())
    assert found["stage_backward_seconds"] == pytest.approx(np.mean(backward, axis=0).tolist())
    assert found["stage_seconds"] == pytest.approx((np.mean(forward, axis=0) + np.mean(backward, axis=0)).tolist())
    assert found["fraction_of_ideal"] == pytest.approx(found["ideal_seconds"] / found["step_seconds"])


def even_problem(memory: float = float("inf")) -> LayoutProblem:
    """Two ranks, 4 LLM layers of 1 s forward and 2 s backward, the rest next to nothing."""
    light = LayerCost(1e-9, 1e-9, 1e-9, 0.0, 1.0, 0.0)
    costs = dict.fromkeys(("patch_embed", "vit", "projector", "word_embed", "head"), light)
    costs["llm"] = LayerCost(1.0, 2.0, 10.0, 2.0, 100.0, 0.0)
    return LayoutProblem(make_profile(1, 4, costs), 2, 4, memory_bytes=memory)


@pytest.mark.parametrize(
    ("cut", "again", "limits"),
    [
        (6, (), ["time", "time"]), (7, (), ["time", "none"]), (5, (), ["none", "time"]),
        (6, (4,), ["time and memory", "none"]), (7, (4,), ["time and memory", "none"]), (5, (4,), ["memory", "time"]),
    ],
)  # fmt: skip
def test_a_stage_is_limited_by_the_pace_or_by_memory(cut: int, again: tuple[int, ...], limits: list[str]) -> None:
    """A rank that recomputes does it for memory; one that works as long as the slowest, but for 2 %, sets the pace."""
    problem = even_problem()
    found = predictions(problem, Layout((0, cut, 9), (again, ())))
    assert found["stage_limit"] == limits


@pytest.mark.parametrize("share", [0.969, 0.971, 1.0])
def test_a_rank_near_its_memory_or_the_slowest_is_limited_by_it(share: float) -> None:
    layout, problem = Layout((0, 6, 9), ((), ())), even_problem()
    found = predictions(even_problem(max(problem.stage_peak_bytes(layout)) / share), layout)
    assert ("memory" in found["stage_limit"][0]) == (share > 0.97)
    head = replace(problem.profile.layers["head"], backward_seconds=6 / share - 6)
    slower = replace(problem, profile=replace(problem.profile, layers={**problem.profile.layers, "head": head}))
    assert predictions(slower, layout)["stage_limit"] == ["time" if share > 0.97 else "none", "time"]


def test_a_plan_says_all_that_was_predicted_and_why_others_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = even_problem(memory=2e9)
    best, worse = Layout((0, 6, 9), ((), ())), Layout((0, 7, 9), ((4, 5), ()))
    candidates = [Candidate(layout, problem.step_seconds(layout)) for layout in (best, worse)]
    plan = make_plan(problem, candidates, "joint")
    assert set(plan.predicted) == set(plan.alternatives[0]["predicted"]) == PREDICTED
    assert plan.memory_gib == pytest.approx(2e9 / GIB)
    assert (plan.budgets, plan.num_microbatches, plan.method) == ({"tiles": 4, "tokens": 128}, 4, "joint")
    assert (plan.model_hash, plan.profile_hash) == ("aa", problem.profile.hash)
    assert plan.predicted["step_seconds"] == pytest.approx((4 + 2 - 1) * 6, rel=1e-6)
    # Three layers of 3 s and two run again, four microbatches: while one rank works, the other is through in time.
    slower = 4 * 11 / 30 - 1
    (other,) = plan.alternatives
    assert plan.alternative(0).predicted == predictions(problem, worse)
    assert other["step_seconds"] == pytest.approx(44, rel=1e-6)
    assert other["why"].startswith(
        f"{slower:.2%} slower; its slowest rank works {11 / 6 - 1:+.2%}, +2 recomputed layers"
    )
    monkeypatch.setenv("COLUMNS", "200")
    print_plan(plan)
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 0 patch_embed, vit.0, projector, word_embed, llm.0-1 - 2000.00 4000.00" in said
    assert "step 30000.00 ms, bubble 20.0%, 80.0% of the ideal 24000.00 ms" in said
    assert "7, 2 44000.00" in said


PROFILE = make_profile()


@given(st.integers(0, 10**6), st.sampled_from(METHODS), st.sampled_from(["fewest", "full"]))
def test_every_plan_fits_and_predicts_what_is_simulated(seed: int, method: str, recompute: str) -> None:
    problem = random_problem(seed)
    try:
        candidates = find_layouts(problem, method, recompute=recompute)
    except UserError as error:
        if not any(words in str(error) for words in ("over the limit", "itself: leave out")):
            raise
        return
    assert [c.step_seconds for c in candidates] == sorted(c.step_seconds for c in candidates)
    plan = make_plan(problem, candidates, method)
    plan.validate()
    assert layout_of(plan) == candidates[0].layout
    assert max(plan.predicted["stage_peak_bytes"]) <= problem.memory_bytes
    if problem.cases == (1, 1):
        played = problem.simulate(candidates[0].layout, 0).step_seconds
        assert plan.predicted["step_seconds"] == pytest.approx(played)
    assert 0 <= plan.predicted["fraction_of_ideal"] <= 1 + 1e-9
    for number, other in enumerate(plan.alternatives):
        assert layout_of(plan.alternative(number)) == candidates[1 + number].layout
        assert plan.alternative(number).stages != plan.stages
        assert other["step_seconds"] >= plan.predicted["step_seconds"]


def test_full_recomputes_every_vit_and_llm_layer() -> None:
    problem = LayoutProblem(make_profile(2, 2), ranks=2, microbatches=2)
    plan = make_plan(problem, find_layouts(problem, "parameters", recompute="full"), "parameters")
    assert [i for stage in plan.stages for i in stage.recompute] == [1, 2, 5, 6]


def test_more_stages_than_layers_unknown_methods_and_impossible_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"9 pipeline ranks x 1 chunks are 9 stages, .* only 8 layers"):
        LayoutProblem(make_profile(2, 2), ranks=9, microbatches=2)
    with pytest.raises(UserError, match="above 0 bytes"):
        LayoutProblem(make_profile(), ranks=1, microbatches=1, memory_bytes=float("nan"))
    with pytest.raises(UserError, match="'magic' is not known"):
        find_layouts(LayoutProblem(make_profile(), ranks=1, microbatches=1), "magic")


def test_a_frozen_tower_costs_no_backward_and_keeps_nothing() -> None:
    idle = LayerCost(1.0, 0.0, 0.0, 0.0, 2.0, 4.0)
    profile = replace(make_profile(4, 4, {"patch_embed": idle, "vit": idle}), trained=Trained(("vit",)))
    problem = LayoutProblem(profile, ranks=2, microbatches=4, memory_bytes=150.0)
    best = find_layouts(problem, "joint", seconds=10)[0]
    costs = problem.stage_costs(best.layout)
    assert costs.backward.sum() == pytest.approx(4 * (4 * 4.0 + 3 * 0.2))
    assert make_plan(problem, [best], "joint").trained.frozen == ("vit",)


def test_dealt_experts_make_a_plan_fit() -> None:
    """30B-A3B over 4 pipeline x 8 data-parallel ranks: each needs 36 GiB less, and can do without recomputation."""
    model, plans = preset("qwen3-vl-30b-a3b"), []
    for dealt in (1, 8):
        profile = analytic_profile(
            model, "h100", {"tiles": 16384, "tokens": 8192}, 1, 8, expert_model_parallel_size=dealt
        )
        problem = LayoutProblem(profile, ranks=4, microbatches=8)
        plans.append(make_plan(problem, find_layouts(problem, "layers"), "layers"))
    whole, less = (plan.predicted["stage_peak_bytes"] for plan in plans)
    assert [plan.expert_model_parallel_size for plan in plans] == [1, 8]
    assert all(of_rank <= before for of_rank, before in zip(less, whole, strict=True))
    assert max(less) < max(whole) - 36 * 2**30


@pytest.mark.parametrize("memory", [30, 45, 60])
def test_cheap_outputs_are_given_up_before_whole_layers(memory: int) -> None:
    """At a price of next to nothing; and whole layers only where the cheap ones give back too little."""
    costs = make_profile().layers
    for kind, kept in (("vit", 5.0), ("llm", 4.0)):
        price = 1e-3 * costs[kind].forward_seconds
        costs[kind] = replace(costs[kind], recompute_cheap_seconds=price, recompute_cheap_kept_bytes=kept)
    problem = LayoutProblem(make_profile(4, 4, costs), ranks=1, microbatches=4, memory_bytes=160.0 + memory)
    plan = make_plan(problem, find_layouts(problem, "joint"), "joint")
    (stage,) = plan.stages
    bare = LayoutProblem(make_profile(4, 4), ranks=1, microbatches=4, memory_bytes=160.0 + memory)
    without = find_layouts(bare, "joint")[0]
    assert len(stage.recompute) < len(without.layout.recompute[0]) or not any(without.layout.recompute)
    assert plan.predicted["step_seconds"] <= without.step_seconds
    assert bool(stage.recompute_cheap) == any(without.layout.recompute)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_step_takes_no_less_than_its_hosts(schedule: str) -> None:
    """Small packs of a model whose layers take 10 ms to be asked for; the device takes far less. One that is run again
    is asked for once more. In searches and in the simulator alike."""
    profile = analytic_profile(preset("internvl3.5-2b"), "h100", {"tiles": 1, "tokens": 512})
    asked = {"host_forward_seconds": 0.01, "host_backward_seconds": 0.02}
    layers = {kind: replace(cost, **asked) for kind, cost in profile.layers.items()}
    slow = replace(profile, layers=layers, host_action_seconds=0.001)
    edges, found = even_edges([1.0] * len(profile.chain), 2), {}
    for name, one in (("device", profile), ("host", slow)):
        problem = LayoutProblem(one, 2, 4, schedule_name=schedule)
        for what, layout in (("kept", Layout(edges, ((), ()))), ("again", Layout(edges, ((1, 2), ())))):
            found[name, what] = problem.step_seconds(layout)
            assert problem.simulate(layout).step_seconds == pytest.approx(found[name, what])
    actions, fullest = 3 if schedule == "zb_h1" else 2, max(end - start for start, end in pairwise(edges))
    assert found["host", "kept"] >= 4 * (0.03 * fullest + 0.001 * actions)
    assert found["device", "kept"] < 0.5 * found["host", "kept"]
    assert found["host", "again"] > found["host", "kept"]


def test_only_trained_layers_have_weight_gradients_and_those_are_half_of_a_backward_unless_measured() -> None:
    costs = PROFILE.layers | {"llm": replace(PROFILE.layers["llm"], weight_gradient_seconds=1.0)}
    frozen = replace(PROFILE, layers=costs, trained=Trained(("vit", "projector")))
    weight = kind_tables(frozen, None, microbatches=2, split_backward=True).weight[:, 0, 0]
    expected = {"patch_embed": 0.0, "vit": 0.0, "projector": 0.0, "word_embed": 0.1, "llm": 1.0, "head": 0.1}
    assert dict(zip(Columns.of(PROFILE).kinds, weight.tolist(), strict=False)) == pytest.approx(expected)
    adapted = replace(frozen, trained=Trained(("vit", "projector", "llm"), 4, ("vit", "llm")))
    assert not kind_tables(adapted, None, microbatches=2, split_backward=True).weight.any()


def test_without_packs_every_microbatch_fills_the_budgets() -> None:
    tables = kind_tables(PROFILE, None, microbatches=3, split_backward=False)
    assert tables.forward.shape == (len(columns_of(PROFILE)), 1, 3)
    for kind, forward in zip(Columns.of(PROFILE).kinds, tables.forward, strict=False):
        assert (forward == PROFILE.layers[kind].forward_seconds).all()
    whole, of_option = Columns.of(PROFILE).whole, Columns.of(PROFILE).of_option
    again = tables.recompute[whole]
    assert np.allclose(again, tables.forward[of_option[whole]])  # no other figure was measured
    assert not tables.offered[~whole].any()
