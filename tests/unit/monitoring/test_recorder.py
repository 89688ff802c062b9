"""What is recorded is what ran: every action once, in order, made of the parts that its stage holds, in their order."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron.vlm import pretrain
from megatron.vlm.data.loader import microbatches
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.monitoring.recorder import WARM_UP, Recorder, Timed, aligned, recorded_iterations
from megatron.vlm.platform import Moment
from omnibal_ext.plan import StagePlan, single_stage_plan
from omnibal_ext.report.breakdown import breakdown
from omnibal_ext.report.timeline import packs_of_record, recorded
from omnibal_ext.schedules.actions import Action
from omnibal_ext.schedules.placement import Placement
from tests.distributed import harness
from tests.unit.alone import trainer_alone

CHAIN = harness.SMALL.chain
MICROBATCHES = 3
RECORDED = 5
LATE = 0.2  # seconds
FORWARDS = ["vit forward", "projector forward", "llm forward", "head forward"]
PLAIN = ["head backward", "llm backward", "projector backward", "vit backward"]
# Layer 8 is the first LLM layer, with three more and the head behind it; layer 1 the first of the ViT.
AGAIN = [
    "head backward", "llm backward", "llm recompute", "llm backward", "projector backward", "vit backward",
    "vit recompute", "vit backward",
]  # fmt: skip


@given(st.integers(1, 500), st.integers(0, 40))
def test_iterations_are_spread_over_the_run_and_none_are_neighbours(iterations: int, count: int) -> None:
    chosen = sorted(recorded_iterations(iterations, count))
    assert len(chosen) <= count
    assert all(1 <= number <= iterations for number in chosen)
    assert all(other - one >= 2 for one, other in pairwise(chosen))
    if count and iterations > WARM_UP:
        assert chosen[0] == WARM_UP + 1
    if count > 1 and iterations > WARM_UP + 2:
        assert (chosen[-1], len(chosen)) == (iterations, min(count, (iterations - WARM_UP - 1) // 2 + 1))


class Late(list[Microbatch]):
    reads_media = False

    def __getitem__(self, pack: Any) -> Any:
        time.sleep(LATE if pack == 0 else 0)
        return super().__getitem__(pack)


@pytest.fixture(scope="module", params=[(), (1, 8)], ids=["kept", "recomputed"])
def record(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Iterations 4 to 8 of a trainer of one stage, of which 5 and 7 are recorded; the line of 5."""
    folder = tmp_path_factory.mktemp("recorder")
    plan = single_stage_plan(CHAIN, model="small", model_hash=harness.SMALL.hash)
    stages = (StagePlan((0, len(CHAIN)), request.param),)
    replace(plan, stages=stages, num_microbatches=MICROBATCHES).save(folder / "plan.json")
    with trainer_alone("small", "--plan", str(folder / "plan.json")) as (trainer, model):
        trainer.recorder = Recorder(folder / "timeline.jsonl", (RECORDED, 7))
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, params_dtype=torch.float32), model)
        for number in range(4, 9):
            pretrain.get_args().curr_iteration = number - 1
            packs = microbatches(Late(harness.sample_packs()), range(MICROBATCHES), reading=trainer.recorder.reading)
            trainer.forward_backward(
                forward_step_func=trainer.forward_step, data_iterator=packs, model=model, num_microbatches=MICROBATCHES
            )
            optimizer.step()
        trainer.recorder.close()
        lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
        assert [line["iteration"] for line in lines] == [RECORDED, 7]
        hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model[0].modules())
        yield lines[0] | {"recomputes": bool(request.param), "hooks": hooks}


def test_every_action_is_there_once_in_the_order_of_the_schedule(record: dict[str, Any]) -> None:
    (lane,) = record["lanes"]
    assert [(kind, m) for kind, m, *_ in lane["actions"]] == [(k, m) for m in range(MICROBATCHES) for k in "FB"]
    times = [0, *(edge for _, _, _, start, end, _ in lane["actions"] for edge in (start, end)), lane["end"]]
    assert times == sorted(times)
    assert times[-1] > times[-2]  # the optimizer's step is in it


def test_waits_for_packs_are_there_one_a_pack(record: dict[str, Any]) -> None:
    (lane,) = record["lanes"]
    waits = [end - start for start, end in lane["reads"]]
    assert len(waits) == MICROBATCHES
    assert waits[0] >= LATE  # and as much more as other programs took meanwhile
    assert 0 <= lane["reads"][0][0] < lane["reads"][0][1] <= lane["actions"][0][3]
    assert lane["actions"][0][4] <= lane["reads"][1][0]  # read ahead, behind the forward before
    shares = breakdown(recorded(record, Placement.interleaved(1)))
    assert shares["late data or host"] * lane["end"] >= sum(waits)
    assert shares["fill and drain"] == pytest.approx(0)


def test_parts_come_in_the_order_of_the_chain_and_add_up(record: dict[str, Any]) -> None:
    (lane,) = record["lanes"]
    for kind, microbatch, _, start, end, pieces in lane["actions"]:
        assert sum(seconds for _, _, seconds in pieces) == pytest.approx(end - start)
        parts = [f"{part} {phase}" for part, phase, _ in pieces if part != "other"]
        if harness.sample_packs()[microbatch].media_of("tiles").amount == 0:
            continue  # passes the vision layers by
        assert parts == (FORWARDS if kind == "F" else AGAIN if record["recomputes"] else PLAIN)


def test_it_reads_as_a_timeline_of_these_packs_and_leaves_no_hook(record: dict[str, Any]) -> None:
    timeline = recorded(record, Placement.interleaved(1))
    assert timeline.seconds == record["lanes"][0]["end"]
    packs = packs_of_record(record)
    wanted = harness.sample_packs()[:MICROBATCHES]
    assert packs.tiles.tolist() == [[[pack.media_of("tiles").amount for pack in wanted]]]
    assert packs.tokens.tolist() == [[[pack.tokens for pack in wanted]]]
    assert packs.squares.tolist() == [[[sum(n * n for n in pack.lengths) for pack in wanted]]]
    assert record["hooks"] == 0


def test_ranks_of_one_machine_count_from_one_time() -> None:
    """Whoever leaves the meeting late has started late: a tensor does not arrive before it is sent."""
    sent = {"host": "a", "clock": 100.0, "rank": 0, "data_parallel_rank": 0, "end": 5.0, "reads": [[0.2, 0.4]],
            "held": [[2.0, 100]], "actions": [["F", 0, 0, 1.0, 2.0, []]]}  # fmt: skip
    taken = {**sent, "rank": 1, "clock": 101.5, "actions": [["F", 0, 0, 0.6, 1.6, []]]}
    elsewhere = {**sent, "host": "b", "clock": 7.0, "rank": 2}
    first, second, third = aligned([sent, taken, elsewhere])
    assert first["actions"] == sent["actions"]
    assert second["actions"] == [["F", 0, 0, pytest.approx(2.1), pytest.approx(3.1), []]]
    assert second["end"] == pytest.approx(6.5)
    assert (first["reads"], second["reads"]) == ([[0.2, 0.4]], [[pytest.approx(1.7), pytest.approx(1.9)]])
    assert (first["held"], second["held"]) == ([[2.0, 100]], [[pytest.approx(3.5), 100]])
    assert third["actions"] == sent["actions"]
    assert "clock" not in second


def test_what_ranks_of_a_team_send_each_other_lies_within_a_part_that_goes_on() -> None:
    recorder = Recorder(None, ())
    recorder._current = timed = Timed(Action("B", 0, 0), Moment())
    recorder._mark("llm", "recompute")
    with recorder._exchanging(False):
        time.sleep(0.02)
    recorder._mark("llm", "backward")
    with recorder._exchanging(True):
        time.sleep(0.03)
    timed.end = Moment()
    *_, pieces = timed.record(timed.start)
    shown = [(part, phase) for part, phase, _ in pieces]
    again, back = ("llm", "recompute"), ("llm", "backward")
    exchanges = [("exchange", "recompute"), ("exchange", "backward")]
    assert shown == [("other", "backward"), again, exchanges[0], again, back, exchanges[1], back]
    first, second = (seconds for part, _, seconds in pieces if part == "exchange")
    assert first >= 0.02
    assert second >= 0.03
    recorder._current = None
    with recorder._exchanging(False):
        pass
