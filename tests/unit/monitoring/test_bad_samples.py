"""What goes wrong in an iteration changes nothing else: broken samples weigh nothing, steps not finite are left out."""

import gc
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron.vlm import pretrain
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.monitoring import bad_samples
from megatron.vlm.monitoring.bad_samples import BadSamples, BadSteps
from megatron.vlm.monitoring.journal import Journal
from megatron.vlm.monitoring.meters import TrainingMeter
from megatron.vlm.monitoring.stage_meter import StageMeter
from megatron.vlm.pipeline.rank_packs import RankPacks
from megatron.vlm.pretrain import Trainer
from omnibal_ext.errors import UserError
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.run_metrics import training_intervals
from tests.demo import demo_dataset, demo_packs
from tests.distributed import harness
from tests.media import seen, with_images
from tests.unit.alone import trainer_alone

Case = tuple[Trainer, Any, list[str]]


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Trainer, Any]]:
    with trainer_alone("small") as made:
        yield made


@pytest.fixture
def case(trained: tuple[Trainer, Any], monkeypatch: pytest.MonkeyPatch) -> Case:
    """A trainer without memory of other tests, its model, and what is said."""
    trainer, model = trained
    said: list[str] = []
    monkeypatch.setattr(bad_samples, "print_rank_0", said.append)
    monkeypatch.setattr(trainer, "bad_samples", {True: BadSamples("data", 2), False: BadSamples("held out", 2)})
    monkeypatch.setattr(trainer, "bad_steps", BadSteps(2, trainer.hosts))
    trainer.meter.tally = pretrain.Tally(1)
    return trainer, model, said


class Written(list[Microbatch]):
    reads_media = False


def packs() -> list[Microbatch]:
    found = [pack for pack in harness.sample_packs() if pack.samples > 1][:4]
    return [replace(pack, pack=number, sample_ids=tuple(range(10 * number, 10 * number + pack.samples)))
            for number, pack in enumerate(found)]  # fmt: skip


def opened(trainer: Trainer, training: bool, batches: list[Microbatch]) -> Iterator[Microbatch]:
    trainer.packs[training] = RankPacks(None)
    return trainer.packs[training].add(Written(batches), lambda: cycle(range(len(batches))), len(batches))  # type: ignore[arg-type]


def run(trainer: Trainer, model: Any, batches: list[Microbatch], iteration: int = 7, **evaluates: bool) -> torch.Tensor:
    for module in model:
        module.zero_grad_buffer()
    given = {"model": model, "num_microbatches": len(batches), "forward_step_func": trainer.forward_step, **evaluates}
    source = opened(trainer, not evaluates, batches)
    trainer._run_iteration({**given, "data_iterator": source}, not evaluates, iteration)
    return torch.cat([buffer.grad_data.clone() for buffer in model[0].buffers])


def optimizer_of(trainer: Trainer, model: Any, lr: float = 0.0, **settings: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bad_samples.training, "get_megatron_optimizer", get_megatron_optimizer)
        trainer.bad_steps.install(trainer.end_training_iteration)
        config = OptimizerConfig(lr=lr, params_dtype=torch.float32, clip_grad=0.0, **settings)
        return bad_samples.training.get_megatron_optimizer(config, model)


def spoilt(batch: Microbatch) -> Microbatch:
    """The pack with pixels that are no numbers."""
    assert seen(batch).values is not None
    assert seen(batch).amount
    return with_images(batch, values=torch.full_like(seen(batch).values, float("nan")))


def by_hand(batch: Microbatch, segment: int) -> Microbatch:
    """The pack with no token of a segment counted."""
    start = sum(batch.lengths[:segment])
    mask = batch.loss_mask.clone()
    mask[start : start + batch.lengths[segment]] = 0
    return replace(batch, loss_mask=mask)


def test_a_broken_sample_balances_no_router() -> None:
    """Its tokens to be predicted are those of no sample, on stages that know no labels too."""
    bad = BadSamples("data", 2, known={21: "cannot be decoded"})
    pack = replace(packs()[2], loss_mask=None, segment_ids=None)
    assert pack.targets is not None
    wanted = pack.targets.clone()
    assert wanted[1] > 0
    wanted[1] = 0
    assert torch.equal(bad.without_known(pack).targets, wanted)
    assert bad.without_known(replace(pack, sample_ids=(1,) * pack.samples)) is not None


def test_a_broken_sample_weighs_nothing_is_named_once_and_counted(case: Case) -> None:
    trainer, model, said = case
    whole = packs()
    broken = [*whole[:2], replace(whole[2], broken=((21, "x.png: cannot be decoded"),)), whole[3]]
    expected = run(trainer, model, [*whole[:2], by_hand(whole[2], 1), whole[3]])
    sizes = list(trainer.meter.tally.sizes)
    trainer.meter.tally = pretrain.Tally(1)
    assert not torch.equal(expected, run(trainer, model, whole))
    trainer.meter.tally = pretrain.Tally(1)
    found = run(trainer, model, broken)
    assert torch.equal(found, expected)
    assert trainer.meter.tally.sizes == sizes  # what was run again counts once
    assert said == ["warning: x.png: cannot be decoded: it weighs nothing from now on (1 of 2 such samples)"]
    assert torch.equal(run(trainer, model, broken), expected)  # it is known: nothing is said or run again
    assert len(said) == 1
    assert torch.equal(run(trainer, model, [replace(pack, broken=()) for pack in broken]), expected)


def test_more_broken_samples_than_may_be_end_the_run(case: Case) -> None:
    trainer, model, _ = case
    first, *rest = packs()
    many = tuple((sample, f"{sample}.png: gone") for sample in (0, 1))
    run(trainer, model, [replace(first, broken=many), *rest])
    with pytest.raises(UserError, match=r"3 samples of data .* limit 2: 30.png: gone; .*--max-bad-samples"):
        run(trainer, model, [first, *rest[:2], replace(rest[2], broken=((30, "30.png: gone"),))])


def test_an_evaluation_leaves_broken_samples_out_too(case: Case) -> None:
    trainer, model, _ = case
    whole = packs()[:2]
    losses = []
    for batches in ([by_hand(whole[0], 0), whole[1]], [replace(whole[0], broken=((0, "gone"),)), whole[1]]):
        model[0].eval()
        trainer.evaluation.tally = pretrain.Tally(1)
        run(trainer, model, batches, 0, forward_only=True)
        losses.append(trainer.evaluation.tally.losses.clone())
        model[0].train()
    assert torch.equal(*losses)


def test_a_step_that_is_not_finite_is_left_out_named_and_limited(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model, said = case
    optimizer, tallies = optimizer_of(trainer, model, 1e-2), []
    monkeypatch.setattr(trainer.meter, "end_iteration", lambda *_: tallies.append(trainer.meter.tally))
    whole = packs()
    bad = [whole[0], spoilt(whole[1]), *whole[2:]]

    def steps(batches: list[Microbatch]) -> bool:
        before = [weight.detach().clone() for weight in model[0].parameters()]
        run(trainer, model, batches)
        done, _, _ = optimizer.step()
        same = all(torch.equal(weight, kept) for weight, kept in zip(model[0].parameters(), before, strict=True))
        assert same == (not done)
        return bool(done)

    samples = ", ".join(map(str, whole[1].sample_ids))
    assert steps(whole)
    assert not steps(bad)
    assert tallies[-1].losses.isfinite().all()
    place = f"microbatch 1 of data-parallel rank 0 (pack 1, samples {samples}): the step is left out (1 in a row, 1 "
    assert f"iteration 7: the loss is not finite in {place}" in said[0]
    assert steps(whole)  # and those in a row are counted anew
    assert not steps(bad)
    assert not steps(bad)
    with pytest.raises(UserError, match=r"pack 1, .*3 steps in a row were not finite, limit 2 \(--max-bad-steps\)"):
        steps(bad)


def test_a_loss_that_is_not_finite_is_seen_where_its_gradients_are(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label of no chance at all: its loss is infinite, its gradient is not."""
    trainer, model, said = case
    optimizer, weighted = optimizer_of(trainer, model), pretrain.weighted_loss

    def infinite(*losses: torch.Tensor) -> Any:
        total, normaliser, record = weighted(*losses)
        return total + float("inf"), normaliser, record

    monkeypatch.setattr(pretrain, "weighted_loss", infinite)
    run(trainer, model, packs())
    assert not optimizer.step()[0]
    assert "the loss is not finite in microbatch 0 of data-parallel rank 0" in said[0]


@pytest.mark.parametrize("at", ["gradient", "loss"])
def test_gradients_that_overflow_alone_are_seen(case: Case, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Under a loss scale they are the scaler's affair, but not where the loss was not finite before."""
    trainer, model, said = case
    execute, optimizer = trainer.executor, optimizer_of(trainer, model)

    def overflowing(**arguments: Any) -> list[Any]:
        records = execute(**arguments)
        model[0].buffers[0].grad_data[3] = float("inf")
        return records

    monkeypatch.setattr(trainer, "executor", overflowing)
    whole = packs()
    whole = [whole[0], spoilt(whole[1]), *whole[2:]] if at == "loss" else whole
    run(trainer, model, whole)
    assert not optimizer.step()[0]
    assert ("gradients are not finite, though all losses are" in said[0]) == (at == "gradient")
    said.clear()
    scaled = types.SimpleNamespace(prepare_grads=lambda: True, get_grad_norm=lambda: 1 / 0,  # fp16: it overflowed
                                   get_loss_scale=lambda: torch.tensor([2.0]), config=dynamic(1.0))  # fmt: skip
    trainer.bad_steps.watch(scaled, trainer.end_training_iteration)
    run(trainer, model, whole)
    assert scaled.prepare_grads()
    assert bool(said) == (at == "loss")


def dynamic(least: float) -> OptimizerConfig:
    return OptimizerConfig(fp16=True, min_loss_scale=least)


@pytest.mark.parametrize(
    ("config", "falls", "remedy"),
    [(OptimizerConfig(fp16=True, loss_scale=0.1), 0, "--loss-scale"), (dynamic(0.1), 2, "--min-loss-scale")],
    ids=["constant", "dynamic"],
)
def test_steps_that_a_scaler_leaves_out_count(case: Case, config: OptimizerConfig, falls: int, remedy: str) -> None:
    """0.1 is not the same number in single precision, in which the scale is kept."""
    trainer, model, said = case
    scales = [torch.tensor([0.1 * 2**fall]) for fall in range(falls, -1, -1)]
    overflows = iter([True] * (falls + 2) + [False] + [True] * 3)

    def prepare() -> bool:
        overflow = next(overflows)
        if overflow and len(scales) > 1:
            scales.pop(0)
        return overflow

    optimizer = types.SimpleNamespace(
        prepare_grads=prepare, get_grad_norm=lambda: 1.0, get_loss_scale=lambda: scales[0], config=config
    )
    trainer.bad_steps.watch(optimizer, trainer.end_training_iteration)
    for fall in range(falls):
        run(trainer, model, packs(), iteration=fall + 1)
        assert optimizer.prepare_grads()
    assert (said, trainer.bad_steps.total, trainer.bad_steps.in_a_row) == ([], falls, 0)
    for left_out in range(2):
        run(trainer, model, packs(), iteration=falls + left_out + 1)
        assert optimizer.prepare_grads()
    _, second = said
    assert second.startswith(f"warning: iteration {falls + 2}: gradients overflow under a loss scale of 0.1, which")
    assert f"(2 in a row, {falls + 2} since the start)" in second
    assert [optimizer.prepare_grads() for _ in range(3)] == [False, True, True]
    with pytest.raises(UserError, match=rf"3 steps in a row were .*, limit 2 \(--max-bad-steps\): lower {remedy}"):
        optimizer.prepare_grads()


def test_an_iteration_lets_its_packs_go(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels of all of its microbatches would not fit beside the activations that are planned."""
    trainer, model, _ = case
    seen: list[weakref.ref[Microbatch]] = []

    def watched(handle: Any, batch: Microbatch, *more: torch.Tensor) -> Any:
        seen.append(weakref.ref(batch))
        return handle(batch, *more)

    for owner, name in ((trainer.recorder, "add_pack"), (trainer.bad_steps, "note_loss")):
        monkeypatch.setattr(owner, name, partial(watched, getattr(owner, name)))
    run(trainer, model, packs())
    gc.collect()
    assert [pack() for pack in seen] == [None] * 8


def test_a_pack_with_a_broken_image_has_black_tiles_of_the_same_shape(tmp_path: Path) -> None:
    data = demo_dataset(tmp_path, tmp_path / "data", 12)
    index = demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=200, llm_budget=2000))
    dataset = PackDataset(data, index, Needs(frozenset({"tiles"}), tokens=True, labels=True))
    whole = dataset[0]
    sample = next(sample for sample in whole.sample_ids if data.sizes.tiles[sample])
    (tmp_path / data.sample(sample).images[0].path).unlink()
    broken = dataset[0]
    assert seen(broken).values.shape == seen(whole).values.shape
    assert [number for number, _ in broken.broken] == [sample]
    assert data.sample(sample).images[0].path in broken.broken[0][1]
    changed = (seen(broken).values != seen(whole).values).flatten(1).any(1)
    assert int(changed.sum()) <= int(data.sizes.tiles[sample])
    assert not seen(broken).values[changed].any()


@pytest.fixture
def metered(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    trainer, path = case[0], tmp_path / "metrics.jsonl"
    meter = TrainingMeter(("made up",), 1, Journal(str(path)))
    meter.start(None, 0, 1.0)
    monkeypatch.setattr(trainer, "meter", meter)
    monkeypatch.setattr(trainer, "stages", StageMeter(trainer.plan))
    return path


def test_what_went_wrong_stands_in_the_metrics(case: Case, metered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that was left out has no loss, which is another thing than a loss of 0."""
    trainer, model, _ = case
    optimizer, (first, second, third, fourth) = optimizer_of(trainer, model), packs()
    bad, broken = spoilt(second), replace(third, broken=((21, "x.png: cannot be decoded"),))
    iterations = ((second, third), (bad, third), (bad, broken), (second, broken))
    for iteration, middle in enumerate(iterations, start=1):
        run(trainer, model, [first, *middle, fourth], iteration=iteration)
        optimizer.step()
    lines = training_intervals(metered)
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2, 2]
    assert [line["replaced_samples"] for line in lines] == [0, 0, 1, 1]
    assert [line["loss"] is None for line in lines] == [False, True, True, False]
    assert [bool(line["source_losses"]) for line in lines] == [True, False, False, True]
    assert all(line["loss"] > 1 for line in lines if line["loss"] is not None)
    assert [0 <= line["bubble"] < 1 for line in lines[2:]] == [True, True]
    said = [line for line in capsys.readouterr().out.splitlines() if "after iteration" in line]
    assert "loss none" in said[1]
    assert "replaced samples 1 | skipped steps 2 |" in said[3]
