"""Methods give plans that fit, hold every layer once, and say what they predict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import METHODS, find_layouts, make_plan

from .instances import make_profile, random_problem


@given(st.integers(0, 10**6), st.sampled_from(METHODS), st.sampled_from(["fewest", "full"]))
def test_every_plan_fits_and_predicts_what_is_simulated(seed: int, method: str, recompute: str) -> None:
    problem = random_problem(seed)
    try:
        candidates = find_layouts(problem, method, recompute=recompute)
    except UserError as error:
        if "over the limit" not in str(error) and "no virtual chunks" not in str(error):
            raise
        return
    assert [c.step_seconds for c in candidates] == sorted(c.step_seconds for c in candidates)
    plan = make_plan(problem, candidates, method)
    plan.validate()
    assert max(plan.predicted["stage_peak_bytes"]) <= problem.memory_bytes
    played = [problem.simulate(candidates[0].layout, case).step_seconds for case in range(1)]
    if problem.cases == (1, 1):
        assert plan.predicted["step_seconds"] == pytest.approx(played[0])
    assert 0 <= plan.predicted["fraction_of_ideal"] <= 1 + 1e-9
    for number, other in enumerate(plan.alternatives):
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
