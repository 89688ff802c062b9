"""What meters report is what ran, whatever rank it ran on; sums by source are the total; nobody waits in between."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.vlm.loss import REDUCTIONS, token_weights, weighted_loss
from megatron.vlm.media import Images, Media, together
from megatron.vlm.microbatch import Microbatch, segment_ids
from megatron.vlm.monitoring import journal, meters
from megatron.vlm.monitoring.journal import Journal
from megatron.vlm.monitoring.meters import EvaluationMeter, Tally, Throughput, TrainingMeter
from omnibal_ext.costs.operations import ModelOperations
from omnibal_ext.modalities.modality import ENCODED

NAMES = ("web", "docs", "charts")


def a_pack(generator: torch.Generator, tiles: int, lengths: list[int], padding: int = 0) -> Microbatch:
    """A pack of samples of random sources, random tokens of which count; its last `padding` tokens are of nobody."""
    lengths = lengths + [padding] * (padding > 0)
    mask = torch.randint(0, 2, (sum(lengths),), generator=generator).float()
    mask[sum(lengths) - padding :] = 0
    return Microbatch(
        tuple(lengths), len(lengths) - (padding > 0), sum(lengths) - padding, loss_mask=mask,
        media={
            "tiles": Images(together(tiles)), "frames": Media(((7 * tiles, 5), (tiles**2,))),
            "stills": Media(((2 * tiles**2,),)),
        },
        useful_squares=sum(length**2 for length in lengths) - padding**2, segment_ids=segment_ids(lengths),
        sources=torch.randint(0, len(NAMES), (len(lengths),), generator=generator),
    )  # fmt: skip


@pytest.fixture(params=[1, 2])
def run(request: pytest.FixtureRequest) -> list[list[list[tuple[Microbatch, Tensor]]]]:
    """Two data-parallel ranks x 4 iterations x 3 microbatches with their losses."""
    generator = torch.Generator().manual_seed(request.param)

    def microbatch() -> tuple[Microbatch, Tensor]:
        tiles, *lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
        batch = a_pack(generator, tiles, lengths, padding=tiles % 3)
        return batch, torch.rand(batch.tokens, generator=generator) * 9

    return [[[microbatch() for _ in range(3)] for _ in range(4)] for _ in range(2)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Gathering as on two ranks: what is in this list is what the other rank sends next."""
    others: list[Tensor] = []

    class Group:
        def size(self) -> int:
            return 2

    def all_gather(out: list[Tensor], mine: Tensor, group: Group) -> None:
        for place, value in zip(out, (mine, others.pop(0)), strict=True):
            place.copy_(value)

    monkeypatch.setattr(meters.parallel_state, "get_data_parallel_group", Group)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(journal, "print_rank_last", lambda line: None)
    return others


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    time = [100.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: time[0])
    return time


def sent(iterations: list[list[tuple[Microbatch, Tensor]]]) -> Tensor:
    """What a rank sends of these iterations, counted here once more: sizes of each, then losses by source."""
    sizes: list[float] = []
    losses = [[0.0, 0.0] for _ in NAMES]
    for iteration in iterations:
        packs = [batch for batch, _ in iteration]
        sizes += [sum(p.tokens for p in packs)]
        sizes += [sum(p.useful_tokens for p in packs), sum(p.samples for p in packs)]
        sizes += [sum(length**2 for p in packs for length in p.lengths), sum(p.useful_squares for p in packs)]
        sizes += [sum(p.useful_tokens for p in packs)]  # none says which of its tokens count
        sizes += [sum(p.media_of(one.size).amount for p in packs) for one in ENCODED]
        for batch, of_tokens in iteration:
            start = 0
            for length, source in zip(batch.lengths, batch.sources.tolist(), strict=True):
                for token in range(start, start + length):
                    losses[source][0] += (of_tokens[token] * batch.loss_mask[token]).item()
                    losses[source][1] += batch.loss_mask[token].item()
                start += length
    return torch.tensor([*sizes, *(value for pair in losses for value in pair)], dtype=torch.float64)


def feed(tally: Tally, iteration: list[tuple[Microbatch, Tensor]]) -> None:
    for batch, losses in iteration:
        tally.add(batch, losses, token_weights(batch, REDUCTIONS["token"]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reported(run: list, ranks: list, folder: Path, pace: Throughput | None = None) -> dict[str, Any]:
    """The line of a run of one interval, which took 100 s and what counting takes."""
    meter = TrainingMeter(NAMES, 4, Journal(str(folder / "metrics.jsonl")), pace)
    meter.started -= 100
    ranks.append(sent(run[1]))
    for number, iteration in enumerate(run[0], start=1):
        feed(meter.tally, iteration)
        meter.end_iteration(number)
    (line,) = lines(folder / "metrics.jsonl")
    return line


def test_an_interval_is_reported_over_all_ranks(run: list, ranks: list, clock: list, tmp_path: Path) -> None:
    mine, other = run
    meter = TrainingMeter(NAMES, 2, Journal(str(tmp_path / "metrics.jsonl")))
    meter.start(iterations=7, consumed_samples=1000, samples_per_epoch=500.0)
    ranks += [sent(other[:2]), sent(other[2:])]
    for number, iteration in enumerate(mine, start=3):  # resumed after two
        feed(meter.tally, iteration)
        clock[0] += 2.0
        meter.end_iteration(number)
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["iteration"], second["iteration"], first["iterations"]) == (4, 6, 7)
    packs = [batch for rank in run for iteration in rank[:2] for batch, _ in iteration]
    samples, useful = sum(p.samples for p in packs), sum(p.useful_tokens for p in packs)
    wanted = {
        "samples": samples, "samples_per_second": samples / 4.0, "useful_tokens_per_second": useful / 4.0,
        "padding": pytest.approx(1 - useful / sum(p.tokens for p in packs)), "consumed_samples": 1000 + samples,
        "epoch": (1000 + samples) / 500,
    }  # fmt: skip
    assert wanted.items() <= first.items()
    assert second["consumed_samples"] == 1000 + samples + second["samples"]
    assert second["epoch"] == second["consumed_samples"] / 500
    later = sum(batch.samples for rank in run for iteration in rank[2:] for batch, _ in iteration)
    assert (first["seconds"], second["seconds"]) == (4.0, 4.0), "each interval has its own clock"
    assert (second["samples"], second["samples_per_second"]) == (later, later / 4.0)


@pytest.mark.parametrize("name", ["tiles", "tokens", "squares", "frames", "stills"])
def test_dist_ratio_is_the_mean_share_of_waiting(run: list, ranks: list, name: str, tmp_path: Path) -> None:
    """OmniBal, section 3: of every iteration sum_i (T_max - T_i) / (T_max N), and the mean over iterations."""
    line, ratios = reported(run, ranks, tmp_path), []

    def count(batch: Microbatch) -> int:
        if name in batch.media:
            return batch.media_of(name).amount
        return sum(length ** (2 if name == "squares" else 1) for length in batch.lengths)

    for of_ranks in zip(*run, strict=True):
        work = [sum(count(batch) for batch, _ in of_rank) for of_rank in of_ranks]
        ratios.append(sum(max(work) - each for each in work) / (max(work) * len(work)))
    field = {
        "tiles": "dist_ratio_vit", "tokens": "dist_ratio_llm", "squares": "dist_ratio_attention",
        "frames": "dist_ratio_audio", "stills": "dist_ratio_film",
    }[name]  # fmt: skip
    assert line[field] == pytest.approx(sum(ratios) / len(ratios))


def test_losses_of_sources_are_their_tokens_means(run: list, ranks: list, tmp_path: Path) -> None:
    line = reported(run, ranks, tmp_path)
    expected = sum(sent(rank)[-2 * len(NAMES) :].view(-1, 2) for rank in run)
    for source, (total, weight) in zip(NAMES, expected.tolist(), strict=True):
        assert line["source_losses"][source] == pytest.approx(total / weight, rel=1e-6)
    records = [weighted_loss(of, batch.loss_mask)[2]["lm loss"] for r in run for i in r for batch, of in i]
    total, weight = torch.stack(records).double().sum(0).tolist()
    assert line["loss"] == pytest.approx(total / weight, rel=1e-6)  # what Megatron logs


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sums_by_source_are_the_loss_of_the_reduction(run: list, reduction: str) -> None:
    tally, expected = Tally(len(NAMES)), torch.zeros(2)
    for batch, losses in run[0][0]:
        weights = token_weights(batch, REDUCTIONS[reduction])
        tally.add(batch, losses, weights)
        expected += weighted_loss(losses, weights)[2]["lm loss"]
    assert tally.losses.sum(0).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_of_ours_asks_the_device_inside_an_iteration(reduction: str, ranks: list, tmp_path: Path) -> None:
    """On a device that has shapes and no values, whoever wanted a value would raise."""
    batch = a_pack(torch.Generator().manual_seed(0), 3, [4, 5], padding=2)
    batch = batch.with_tensors(lambda tensor: tensor.to("meta"))
    meter = TrainingMeter(NAMES, 10, Journal(str(tmp_path / "metrics.jsonl")))
    for iteration in (1, 2):
        meter.tally.losses = meter.tally.losses.to("meta")
        losses = torch.empty(batch.tokens, device="meta")
        weights = token_weights(batch, REDUCTIONS[reduction])
        meter.tally.add(batch, losses, weights)
        weighted_loss(losses, weights)
        meter.end_iteration(iteration)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_iteration_run_again_counts_once(run: list, ranks: list, tmp_path: Path) -> None:
    meter = TrainingMeter(NAMES, 2, Journal(str(tmp_path / "metrics.jsonl")))
    ranks.append(sent(run[0][:2]))
    for number, ends in ((1, False), (1, True), (2, True)):
        meter.begin_iteration()
        feed(meter.tally, run[0][number - 1])
        if ends:
            meter.end_iteration(number)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["samples"] == 2 * sum(batch.samples for iteration in run[0][:2] for batch, _ in iteration)


def test_evaluating_takes_nothing_from_the_training_rates(ranks: list, clock: list, run: list, tmp_path: Path) -> None:
    meter = TrainingMeter(NAMES, 2, Journal(str(tmp_path / "metrics.jsonl")))
    evaluation = EvaluationMeter(NAMES, 2, Journal(None))
    ranks += [sent([run[1][0]]), sent([run[1][0], run[1][0]])]
    for number in (1, 2):
        feed(meter.tally, run[0][0])
        clock[0] += 3.0
        meter.end_iteration(number)
        if number == 1:
            for iteration, last in zip(run[0][:2], (False, True), strict=True):
                evaluation.begin_iteration()
                feed(evaluation.tally, iteration)
                clock[0] += 50.0
                assert evaluation.end_iteration() == last
            meter.exclude(evaluation.end_pass(number))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["seconds"] == 6.0
    assert line["samples"] == 2 * sum(batch.samples for rank in run for batch, _ in rank[0])


def test_an_evaluation_is_a_mean_over_tokens_not_over_iterations(run: list, ranks: list, tmp_path: Path) -> None:
    """Passes alike report alike: nothing is left over from the one before."""
    mine, other = run
    evaluation = EvaluationMeter(NAMES, len(mine), Journal(str(tmp_path / "metrics.jsonl")))
    together = sum(sent(rank)[-2 * len(NAMES) :].view(-1, 2) for rank in run)
    alone = sent(other)
    sizes = alone[: -2 * len(NAMES)].view(len(other), -1).sum(0)
    for training_iteration in (10, 20):
        ranks.append(torch.cat([sizes, alone[-2 * len(NAMES) :]]))
        ends = []
        for iteration in mine:
            evaluation.begin_iteration()
            feed(evaluation.tally, iteration)
            ends.append(evaluation.end_iteration())
        assert ends == [False] * (len(mine) - 1) + [True]
        evaluation.end_pass(training_iteration)
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["iteration"], second["iteration"]) == (10, 20)
    total, weight = together.sum(0).tolist()
    assert first["evaluation"]["loss"] == pytest.approx(total / weight, rel=1e-7)
    assert first["evaluation"]["samples"] == sum(batch.samples for rank in run for i in rank for batch, _ in i)
    for name in ("loss", "samples", "source_losses"):
        assert first["evaluation"][name] == second["evaluation"][name]


def test_figures_go_to_megatrons_own_writers(monkeypatch: pytest.MonkeyPatch, ranks: list, run: list) -> None:
    scalars: dict[str, tuple[int, float]] = {}
    logged: dict[str, tuple[int, float]] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            scalars[tag] = (global_step, scalar_value)

    class Wandb:
        def log(self, data: dict[str, Any], step: int) -> None:
            logged.update({name: (step, value) for name, value in data.items()})

    monkeypatch.setattr(journal, "get_tensorboard_writer", Writer)
    monkeypatch.setattr(journal, "get_wandb_writer", Wandb)
    sizes = torch.tensor([[[10, 8, 2, 60, 40, 8, 0, 0, 4]], [[10, 10, 3, 40, 40, 10, 0, 0, 2]]])
    report = meters.interval_report(sizes, torch.tensor([[6.0, 3.0], [0.0, 0.0], [2.0, 4.0]]), 0.5, NAMES)
    book = Journal(None)
    book.training(6, {"iterations": 9, "epoch": 0.25, **report})
    expected = {
        "samples-per-second": 10.0, "useful-tokens-per-second": 36.0, "padding": 0.1, "dist-ratio-vit": 0.25,
        "dist-ratio-llm": 0.0, "dist-ratio-attention": 1 / 6, "epoch": 0.25, "lm loss of web": 2.0,
        "lm loss of charts": 0.5,
    }  # fmt: skip
    assert scalars == {name: (6, pytest.approx(value)) for name, value in expected.items()}
    assert logged == scalars
    book.evaluation(6, {"loss": 1.5, "samples": 8, "source_losses": {"docs": 1.5}})
    assert scalars["lm loss validation of docs"] == logged["lm loss validation of docs"] == (6, 1.5)


def test_pace_is_of_what_samples_need_and_not_of_what_ran(run: list, ranks: list, tmp_path: Path) -> None:
    """Padding is in `tokens` and `squares`, and in neither of the figures that count."""
    packs = [batch for rank in run for i in rank for batch, _ in i]
    useful = sum(p.useful_tokens for p in packs)
    # Of each as many operations: a figure that is a little off is seen, whichever it is.
    parts = [sum(p.media_of("tiles").amount for p in packs), useful, sum(p.useful_squares for p in packs), useful]
    parts.append(sum(7 * p.media_of("tiles").amount + 5 + p.media_of("tiles").amount ** 2 for p in packs))
    parts.append(sum(2 * p.media_of("tiles").amount ** 2 for p in packs))
    tile, token, square, counted, frame, still = (1e12 / part for part in parts)
    units = {"tiles": tile, "tokens": token, "frames": frame, "stills": still}
    pace = Throughput(ModelOperations(units, square, counted), devices=4, peak=1e13)
    line = reported(run, ranks, tmp_path, pace)
    assert line["model_tflops"] == pytest.approx(6e12 / line["seconds"] / 4 / 1e12)
    assert line["mfu"] == pytest.approx(6e12 / line["seconds"] / 4 / 1e13)


@pytest.mark.parametrize(
    ("interval", "reported"), [(1, [1, 2, 3, 4, 5, 6, 7, 8]), (3, [3, 6, 8]), (4, [4, 8]), (10, [8])]
)
def test_every_so_many_iterations_are_reported_and_the_last(interval: int, reported: list[int], tmp_path: Path) -> None:
    meter = TrainingMeter(("a",), interval, Journal(tmp_path / "metrics.jsonl"))
    meter.start(8, 0, 1.0)
    assert [iteration for iteration in range(1, 9) if meter.ends_interval(iteration)] == reported
