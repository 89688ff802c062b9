"""Stages, bubble and bytes are what ran."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from megatron.vlm import platform
from megatron.vlm.monitoring import stage_meter
from megatron.vlm.monitoring.stage_meter import StageMeter, bubble
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import Action
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.simulate import simulate
from tests.chains import layer_chain
from tests.unit.schedules.uniform import uniform


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(platform, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    for group in ("pipeline_model", "data"):
        name = f"get_{group}_parallel_group"
        monkeypatch.setattr(stage_meter.parallel_state, name, lambda: torch.distributed.group.WORLD)


@pytest.mark.usefixtures("alone")
def test_an_interval_is_its_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks on one rank, 6 microbatches; an action of chunk 0 takes 5 ms, one of chunk 1 takes 10, and after each
    the rank waits as long. Evaluations and the warm-up do not count, and an iteration that is run again counts once.
    """
    plan = Plan.from_cuts(layer_chain(2, 2), (4,), virtual_pipeline_model_parallel_size=2, num_microbatches=6)
    clock, meter, reports = Clock(monkeypatch), StageMeter(plan), []

    def run(training: bool, slower: float) -> None:
        with meter.iteration(training):
            for action in (Action(kind, m, chunk) for m in range(6) for chunk in (0, 1) for kind in "FB"):
                with meter.watch(action):
                    clock.now += 0.005 * (1 + action.chunk) * slower
                clock.now += 0.005 * (1 + action.chunk) * slower

    for number in range(1, 7):
        if number == 4:
            run(True, 50.0)  # a sample turned out to be broken: this one is run again
        run(True, 10.0 if number <= 2 else 1.0)
        meter.end_iteration()
        if number % 2 == 0:
            run(False, 99.0)
            reports.append(meter.end_interval())
    assert reports[0] == {}
    span = 6 * 2 * 2 * (0.005 + 0.010) - 0.010
    for report in reports[1:]:
        assert report == {"bubble": pytest.approx(1 - 0.18 / span), "stage_seconds": pytest.approx([0.010, 0.020])}


def played(costs: Sequence[float], microbatches: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """worked, spans and the bubble of a 1F1B schedule as the simulator plays it; costs: seconds of F on each stage."""
    plan = Plan.from_cuts(layer_chain(2, 4), tuple(range(2, 1 + len(costs))), num_microbatches=microbatches)
    program = compile_schedule(plan.build_schedule(), microbatches)
    play = simulate(program, uniform(microbatches, costs, [2 * cost for cost in costs]))
    lines = [play.timeline(rank) for rank in range(len(costs))]
    worked = [[sum(end - start for _, start, end in line)] for line in lines]
    spans = [line[-1][2] - line[0][1] for line in lines]
    return torch.tensor(worked)[None, :, None], torch.tensor(spans)[None, :, None], play.bubble_fraction


@pytest.mark.parametrize("costs", [[1.0, 1.0], [1.0, 2.0, 0.5], [3.0, 1.0, 1.0, 2.0]])
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_the_bubble_is_the_simulators(costs: list[float], microbatches: int) -> None:
    """Ranks that do as the simulator says measure the bubble that the plan predicts."""
    worked, spans, predicted = played(costs, microbatches)
    assert bubble(worked, spans) == pytest.approx(predicted)
    ranks = len(costs)
    if len(set(costs)) == 1:
        assert bubble(worked, spans) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    both = torch.cat([worked, worked / 2]), torch.cat([spans, spans])
    assert bubble(*both) == pytest.approx((predicted + 1 - (1 - predicted) / 2) / 2), "the mean over replicas"


def test_figures_of_all_ranks_are_gathered_by_replica_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of three pipeline ranks, two iterations, two chunks; of bytes the replica that has most counts."""
    random = torch.Generator().manual_seed(0)
    timed = torch.rand(2, 3, 2, 3, dtype=torch.float64, generator=random)  # replica, rank, iteration, chunks and span
    peaks = [[5, 9, 2], [7, 3, 2]]

    def all_gathered(mine: torch.Tensor, group: str) -> torch.Tensor:
        if group == "pipeline":
            rows = [torch.cat([timed[0, rank].flatten(), torch.tensor([float(peaks[0][rank])])]) for rank in range(3)]
            assert mine.tolist() == rows[1].tolist()
            return torch.stack(rows)
        other = [torch.cat([timed[1, rank].flatten(), torch.tensor([float(peaks[1][rank])])]) for rank in range(3)]
        return torch.stack([mine, torch.stack(other)])

    monkeypatch.setattr(stage_meter.parallel_state, "get_pipeline_model_parallel_group", lambda: "pipeline")
    monkeypatch.setattr(stage_meter.parallel_state, "get_data_parallel_group", lambda: "data")
    monkeypatch.setattr(stage_meter, "all_gathered", all_gathered)
    worked, spans, most = stage_meter.gather_timings(timed[0, 1], peaks[0][1])
    assert worked.tolist() == timed[..., :2].tolist()
    assert spans.tolist() == timed[..., 2].tolist()
    assert most == [7, 9, 2]
