"""The measured last word: a trial leaves nothing behind, the fastest layout is kept, all figures are recorded."""

import json
from pathlib import Path

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch.candidates import keep_fastest, layouts, measured_seconds, trial_flags
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts, make_plan
from omnibal_ext.plan import Plan
from tests.unit.layout.instances import make_profile


@pytest.fixture
def plan() -> Plan:
    problem = LayoutProblem(make_profile(4, 4), ranks=2, microbatches=4)
    return make_plan(problem, find_layouts(problem, "bmp", radius=2), "bmp")


def test_the_best_layouts_are_tried_and_never_more_than_there_are(plan: Plan) -> None:
    assert [p.stages for p in layouts(plan, 3)] == [plan.stages, plan.alternative(0).stages, plan.alternative(1).stages]
    assert len(layouts(plan, 99)) == 1 + len(plan.alternatives)


def test_the_fastest_that_ran_is_kept_with_all_figures(plan: Plan, tmp_path: Path) -> None:
    first, second, third = layouts(plan, 3)
    best = keep_fastest([(first, 2.0), (second, 1.5), (third, None)])
    assert best.stages == second.stages
    assert best.predicted["stage_seconds"] == second.predicted["stage_seconds"]
    predicted = [plan.predicted["step_seconds"] for plan in (first, second, third)]
    figures = [(one["measured_step_seconds"], one["predicted_step_seconds"], one["kept"]) for one in best.trials]
    assert figures == [*zip((2.0, 1.5, None), predicted, (False, True, False), strict=True)]
    best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == best
    with pytest.raises(UserError, match="none of 2 layouts ran 3 steps"):
        keep_fastest([(first, None), (second, None)])


def test_a_trial_saves_and_loads_nothing_and_stops() -> None:
    words = ["--lr", "1e-3", "--save", "here", "--save-interval", "9", "--freeze", "vit", "llm", "--load=it", "--bf16"]
    kept = ["--lr", "1e-3", "--freeze", "vit", "llm", "--bf16"]
    words += ["--from", "weights", "--finetune", "--wandb-project", "p", "--eval-packs", "held-out"]
    assert trial_flags(words) == [*kept, "--from-scratch", "--log-interval", "1", "--exit-interval", "3"]


@pytest.mark.parametrize("steps", range(5))
def test_a_layout_counts_when_all_steps_of_its_trial_ran(steps: int, tmp_path: Path) -> None:
    """One that died in its last step does not; the first warms up, and neither evaluations nor steps behind the trial's
    own are any of it."""
    assert measured_seconds(tmp_path / "metrics.jsonl") is None
    lines: list[dict[str, object]] = [{"iteration": n + 1, "seconds": s} for n, s in enumerate((9.0, 2.0, 4.0, 70.0))]
    lines = [*lines[:1], {"iteration": 1, "evaluation": {"seconds": 100.0}}, *lines[1:]][: steps + (steps > 0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_seconds(tmp_path / "metrics.jsonl") == (3.0 if steps >= 3 else None)
