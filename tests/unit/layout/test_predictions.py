"""What plan.json predicts, and what is printed of it, reckoned once more from the played schedule."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.costs.profile import LayerCost
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import Candidate, find_layouts, make_plan, predictions
from omnibal_ext.units import GIB
from tools.plan_layout import print_plan

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


def test_a_plan_says_all_that_was_predicted_and_why_others_lost(capsys: pytest.CaptureFixture[str]) -> None:
    problem = even_problem(memory=2e9)
    best, worse = Layout((0, 6, 9), ((), ())), Layout((0, 7, 9), ((4, 5), ()))
    candidates = [Candidate(layout, problem.step_seconds(layout)) for layout in (best, worse)]
    plan = make_plan(problem, candidates, "joint")
    assert set(plan.predicted) == set(plan.alternatives[0]["predicted"]) == PREDICTED
    assert plan.memory_gib == pytest.approx(2e9 / GIB)
    assert (plan.vit_budget, plan.llm_budget, plan.num_microbatches, plan.method) == (4, 128, 4, "joint")
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
    print_plan(plan)
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 0 patch_embed, vit.0, projector, word_embed, llm.0-1 - 2000.00 4000.00" in said
    assert "step 30000.00 ms, bubble 20.0%, 80.0% of the ideal 24000.00 ms" in said
    assert "7, 2 44000.00" in said
