"""A run that goes on is the run that was saved; what it could not make use of is said before a rank starts."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.checkpoint.run import check_resumable, describe_run
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.states import DTYPES
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower

Fields = dict[str, Any]
TINY = preset("tiny")
PLAN = Plan.from_cuts(TINY.chain, (4,), model="tiny")
OTHER_PLAN = Plan.from_cuts(TINY.chain, (5,), model="tiny")
FLAGS = {
    "preset": "tiny", "first_weights": None, "global_batch_size": 4, "consumed_train_samples": 12, "train_iters": 9,
    "lr_decay_iters": None, "use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": False,
    "ddp_bucket_size": None, "ddp_num_buckets": None, "data_parallel_size": 2, "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1, "overlap_grad_reduce": True, "optimizer": "adam", "sgd_momentum": 0.9,
    "loss_scale": None, "no_save_optim": False, "freeze": [], "bf16": True, "fp16": False, "finetune": False,
    "no_load_optim": False, "lr": 1e-3, "lora_rank": None, "lr_vit": None, "lr_projector": None,
    "weight_decay_vit": None, "weight_decay_projector": None, "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False, "use_precision_aware_optimizer": False,
    **dict.fromkeys(DTYPES, torch.float32),
}  # fmt: skip


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    for name in ("data", "packs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"checksums": name}))
    return Namespace(**FLAGS, data=str(tmp_path / "data"), packs=str(tmp_path / "packs"))


def saved(args: Namespace, **flags: Any) -> Fields:
    read: Fields = json.loads(json.dumps(describe_run(changed(args, **flags), TINY, PLAN)))
    return read


def changed(args: Namespace, **flags: Any) -> Namespace:
    return Namespace(**{**vars(args), **flags})


PLAIN = {"use_distributed_optimizer": False}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": torch.bfloat16}
SGD = {**PLAIN, "bf16": False, "optimizer": "sgd"}
FP16 = {**PLAIN, "bf16": False, "fp16": True}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, PLAIN, "--use-distributed-optimizer False (was True)"),
        (PLAIN, {}, "--use-distributed-optimizer True (was False)"),
        (PLAIN, {**PLAIN, "bf16": False}, "--bf16 or --fp16 False (was True)"),
        ({}, NARROW, "precision of states"),
        (NARROW, {**NARROW, "exp_avg_sq_dtype": torch.float16}, "--exp-avg-sq-dtype torch.float16 (was"),
        ({**PLAIN, "bf16": False}, FP16, "--bf16 or --fp16 True (was False)"),
        (PLAIN, {**PLAIN, "optimizer": "sgd"}, "--optimizer sgd (was adam)"),
        ({**SGD, "sgd_momentum": 0.0}, SGD, "--sgd-momentum above 0 True (was False)"),
        (SGD, {**SGD, "sgd_momentum": 0.0}, "--sgd-momentum above 0 False (was True)"),
        (FP16, {**FP16, "loss_scale": 8.0}, "loss scale constant (was dynamic)"),
        ({**PLAIN, "loss_scale": 8.0}, FP16, "loss scale dynamic (was constant)"),
        ({**PLAIN, "freeze": ["llm", "vit"]}, {**PLAIN, "freeze": ["llm"]}, "another one: vit trained (was frozen)"),
        ({**PLAIN, "no_save_optim": True}, PLAIN, "without the optimizer's state (--no-save-optim)"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(args: Namespace, before: Fields, now: Fields, said: str) -> None:
    """Each as Megatron was seen to stop at, or the same turned round."""
    with pytest.raises(UserError, match="--no-load-optim") as refusal:
        check_resumable(saved(args, **before), changed(args, **now), TINY, PLAN)
    assert said in str(refusal.value)
    check_resumable(saved(args, **before), changed(args, **now, no_load_optim=True), TINY, PLAN)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (PLAIN, FP16), (PLAIN, {**PLAIN, "loss_scale": 8.0}), (FP16, PLAIN), (PLAIN, {**PLAIN, "freeze": ["vit"]}),
        (SGD, {**SGD, "sgd_momentum": 0.5}), (PLAIN, {**PLAIN, "sgd_momentum": 0.0}),
        (FP16, {**FP16, "no_save_optim": True}),
    ],
)  # fmt: skip
def test_what_megatron_goes_on_with_goes_on(args: Namespace, before: Fields, now: Fields) -> None:
    check_resumable(saved(args, **before), changed(args, **now), TINY, PLAN)


def test_a_save_of_before_saves_told_of_it_goes_on(args: Namespace) -> None:
    before = saved(args)
    del before["optimizer"]
    assert not check_resumable(before, args, TINY, PLAN)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 4)])
def test_the_state_of_experts_elsewhere_is_refused(args: Namespace, distributed: bool, before: int, now: int) -> None:
    first = changed(args, use_distributed_optimizer=distributed, expert_model_parallel_size=before)
    other = changed(first, expert_model_parallel_size=now)
    with pytest.raises(UserError, match=f"size {now}, but .* saved with {before}.*--no-load-optim"):
        check_resumable(saved(first), other, TINY, PLAN)
    assert not check_resumable(saved(first), first, TINY, PLAN)
    check_resumable(saved(first), changed(other, no_load_optim=True), TINY, PLAN)


BESIDE = replace(PLAN, tower=Tower(layers=6, owners=(0, 0, 0, 0, 0, 1), encoding_ranks=((0,),)))
BUCKETS: dict[str, tuple[Fields, Fields, Plan]] = {
    "layers of stages": ({}, {}, OTHER_PLAN),
    "pipeline ranks": ({}, {}, Plan.from_cuts(TINY.chain, (4,), model="tiny", virtual_pipeline_model_parallel_size=2)),
    "owners of the tower": ({}, {}, BESIDE),
    "tensor-parallel ranks": ({}, {"tensor_model_parallel_size": 2}, PLAN),
    "weights in a bucket": ({}, {"ddp_bucket_size": 39_999_999}, PLAN),
    "buckets": ({"ddp_num_buckets": 2}, {"ddp_num_buckets": 3}, PLAN),
    "frozen parts": ({"freeze": ["vit"]}, {"freeze": ["vit", "projector"]}, PLAN),
    "bf16": ({}, {"bf16": False, "fp16": True}, PLAN),
    "fp16": ({"bf16": False, "fp16": True}, {"fp16": False, "bf16": True}, PLAN),
}
"""What decides where a state lies: flags of a save, and of another run in which it alone is different, or its kin."""


def test_all_that_decides_buckets_is_tried(args: Namespace) -> None:
    assert set(saved(args)["buckets"]) == set(BUCKETS)


@pytest.mark.parametrize("name", BUCKETS)
def test_a_state_that_lies_in_other_buckets_is_refused(name: str, args: Namespace) -> None:
    before, now, plan = BUCKETS[name]
    check_resumable(saved(args, **before), changed(args, **before), TINY, PLAN)
    for was, then in ((PLAN, plan), (plan, PLAN)):
        read = json.loads(json.dumps(describe_run(changed(args, **before), TINY, was)))
        with pytest.raises(UserError, match=rf"for other buckets: (.*; )?{name} .* \(was .*--no-load-optim"):
            check_resumable(read, changed(args, **now), TINY, then)
        check_resumable(read, changed(args, **now, no_load_optim=True), TINY, then)
        check_resumable(read, changed(args, **now), TINY, then, is_planned=False)
    whole = saved(args, **before, dist_ckpt_optim_fully_reshardable=True)
    check_resumable(whole, changed(args, **now, dist_ckpt_optim_fully_reshardable=True), TINY, plan)


@pytest.mark.parametrize(("ranks", "most"), [(39, 40_000_000), (40, 40_000_000), (41, 41_000_000)])
def test_buckets_grow_with_the_replicas_as_cores_do(args: Namespace, ranks: int, most: int) -> None:
    """As many million weights as there are, and forty at least; without overlap there is one bucket for all."""
    found = saved(args, data_parallel_size=ranks)["buckets"]
    assert found["weights in a bucket"] == most
    assert saved(args, data_parallel_size=ranks, ddp_bucket_size=7)["buckets"]["weights in a bucket"] == 7
    assert saved(args, overlap_grad_reduce=False)["buckets"]["weights in a bucket"] is None


@pytest.mark.parametrize(("before", "now"), [({}, {"finetune": True}), (PLAIN, PLAIN)])
def test_who_takes_no_state_or_has_it_whole_may_cut_anywhere(args: Namespace, before: Any, now: Any) -> None:
    check_resumable(saved(args, **before), changed(args, **now), TINY, OTHER_PLAN)


@pytest.mark.parametrize("name", ["data", "packs"])
def test_another_dataset_or_index_is_refused(args: Namespace, name: str) -> None:
    before = saved(args)
    Path(getattr(args, name), "manifest.json").write_text('{"checksums": "another"}')
    with pytest.raises(UserError, match=f"--{name} .* not what the run was trained on"):
        check_resumable(before, args, TINY, PLAN)


def test_another_schedule_needs_megatrons_word(args: Namespace) -> None:
    other = changed(args, weight_decay=0.5)
    before = saved(args, weight_decay=0.1)
    with pytest.raises(UserError, match=r"weight_decay 0\.5 \(was 0\.1\); --override.*\(behind --"):
        check_resumable(before, other, TINY, PLAN)
    assert check_resumable(before, changed(other, override_opt_param_scheduler=True), TINY, PLAN)


@pytest.mark.parametrize("name", ["lr", "min_lr"])
@pytest.mark.parametrize("word", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"])
def test_other_rates_take_the_weights_alone(args: Namespace, name: str, word: str) -> None:
    """Core finds the state of a group of weights by its rates, whatever is said of the schedule."""
    other, before = changed(args, **{name: 1e-5, word: True}), saved(args, **{name: 1e-3})
    with pytest.raises(UserError, match=rf"{name} 1e-05 \(was 0\.001\), by which .*--no-load-optim.*\(behind --"):
        check_resumable(before, other, TINY, PLAN)
    assert check_resumable(before, changed(other, no_load_optim=True), TINY, PLAN)


@pytest.mark.parametrize("name", ["lr_vit", "lr_projector", "weight_decay_vit", "weight_decay_projector"])
def test_the_state_of_parts_with_other_rates_is_refused(args: Namespace, name: str) -> None:
    own = changed(args, **{name: 1e-5})
    check_resumable(saved(own), own, TINY, PLAN)
    for before, now in ((args, own), (own, args)):
        with pytest.raises(UserError, match=rf"unlike the run so far: {name}"):
            check_resumable(saved(before), now, TINY, PLAN)
        with pytest.raises(UserError, match=r"rates of parts \[.*--no-load-optim"):
            check_resumable(saved(before), changed(now, override_opt_param_scheduler=True), TINY, PLAN)
