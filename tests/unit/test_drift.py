"""Stages that run as planned are reported so; one that does not is named, with what to run again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.vlm import drift, platform
from megatron.vlm.drift import DriftMeter, drift_report
from omnibal_ext.chain import layer_chain
from omnibal_ext.plan import Plan
from omnibal_ext.schedule import Action


@pytest.fixture
def plan() -> Plan:
    predicted = {"step_seconds": 1.0, "stage_seconds": [0.010, 0.020]}
    chain = layer_chain(2, 2)
    return Plan.from_cuts(chain, (4,), num_microbatches=6, model="tiny", vit_budget=4, llm_budget=64, method="joint",
                          predicted=predicted)  # fmt: skip


def test_small_drifts_are_told_and_no_more(plan: Plan) -> None:
    report = drift_report(plan, [0.012, 0.021])
    assert "stage 0: 12.0 ms, predicted 10.0 (+9% of its share)" in report
    assert "stage 1: 21.0 ms, predicted 20.0 (-5% of its share)" in report
    assert "plan again" not in report


@pytest.mark.parametrize("pace", [0.3, 1.49, 4.0])
def test_a_machine_that_is_slower_throughout_needs_no_other_cut(plan: Plan, pace: float) -> None:
    report = drift_report(plan, [0.010 * pace, 0.020 * pace])
    assert f"all {pace:.2f} x predicted" in report
    assert "plan again" not in report


@pytest.mark.parametrize(("measured", "said"), [([0.015, 0.020], "stage 0 drifts from the plan by +29%"),
                                                ([0.0101, 0.010], "stage 0 drifts from the plan by +51%")])  # fmt: skip
def test_a_stage_that_drifts_is_named_with_what_to_run(plan: Plan, measured: list[float], said: str) -> None:
    report = drift_report(plan, measured)
    assert said in report
    assert "tools/profile_layers.py --model tiny --vit-budget 4 --llm-budget 64" in report
    assert "--pipeline-model-parallel-size 2" in report
    assert "--num-microbatches 6" in report


def test_a_stage_that_is_faster_than_planned_is_named_too() -> None:
    plan = Plan.from_cuts(layer_chain(2, 2), (2, 4), model="tiny", predicted={"stage_seconds": [0.010, 0.010, 0.010]})
    assert "stage 1 drifts from the plan by -25%" in drift_report(plan, [0.010, 0.0067, 0.010])


def test_only_training_iterations_after_the_warm_up_are_timed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, reports = DriftMeter(plan), []
    monkeypatch.setattr(meter, "_report", lambda: reports.append(dict(meter.actions)))
    for number in range(10):
        for training in (True, False):  # an evaluation after every iteration
            with meter.iteration(training), meter.watch(Action("F", 0)):
                pass
        assert len(reports) == (number >= 4)
    assert [len(moments) for moments in reports[0].values()] == [1, 1, 1]


@pytest.mark.usefixtures("one_rank")
def test_what_is_reported_is_forward_and_backward_of_a_microbatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two chunks on one rank, 6 microbatches; an action of chunk 0 takes 5 ms, one of chunk 1 takes 10."""
    predicted = {"step_seconds": 1.0, "stage_seconds": [0.008, 0.025]}
    plan = Plan.from_cuts(layer_chain(2, 2), (4,), virtual_pipeline_model_parallel_size=2, num_microbatches=6,
                          predicted=predicted)  # fmt: skip
    clock = [0.0]
    monkeypatch.setattr(platform, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(
        drift.parallel_state, "get_pipeline_model_parallel_group", lambda: torch.distributed.group.WORLD
    )
    meter = DriftMeter(plan)
    for number in range(5):
        with meter.iteration(True):
            for action in (Action(kind, m, chunk) for m in range(6) for chunk in (0, 1) for kind in "FB"):
                with meter.watch(action):
                    clock[0] += 0.005 * (1 + action.chunk) * (10 if number < 2 else 1)  # the first two warm up
    report = capsys.readouterr().out
    assert "stage 0: 10.0 ms, predicted 8.0 (+38% of its share) | stage 1: 20.0 ms, predicted 25.0 (-12%" in report


def test_a_plan_without_predictions_is_not_compared(plan: Plan) -> None:
    meter = DriftMeter(replace(plan, predicted={}))
    for _ in range(10):
        with meter.iteration(True), meter.watch(Action("F", 0)):
            pass
    assert not meter.actions
