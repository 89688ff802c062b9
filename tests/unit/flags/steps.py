"""Optimizer steps as the flags say, one process, no loop: steps.py OUTPUT.pt. What each case did is compared in
test_obeyed.py with a reference that knows nothing of Megatron."""

import logging
import sys
from dataclasses import dataclass, field

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import get_model_config
from megatron.training import training
from megatron.training.training import destroy_global_state, get_optimizer_param_scheduler
from torch import Tensor

from megatron.vlm import platform, rates
from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.plan import single_stage_plan
from tests.distributed import harness

CASES = {
    "adam": "--lr 1e-2 --min-lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --lr-warmup-init 1e-3 "
    "--lr-decay-iters 5 --weight-decay 0.3 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-3 --clip-grad 6",
    "parts": "--lr 1e-2 --min-lr 2e-3 --lr-decay-style cosine --lr-decay-iters 5 --lr-vit 1e-3 --lr-projector 3e-2 "
    "--weight-decay 0.3 --weight-decay-vit 0.1 --weight-decay-projector 0 --clip-grad 0",
    "sgd": "--lr 1e-1 --optimizer sgd --sgd-momentum 0.7 --lr-warmup-fraction 0.4 --lr-decay-iters 5 --clip-grad 0 "
    "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5",
    "wsd": "--lr 1e-2 --lr-decay-style WSD --lr-decay-iters 6 --lr-wsd-decay-iters 3 --lr-wsd-decay-style minus_sqrt",
    "static scale": "--fp16 --loss-scale 64",
    "falling scale": f"--fp16 --initial-loss-scale {2**60} --hysteresis 2 --min-loss-scale {2**58}",
    "growing scale": "--fp16 --initial-loss-scale 16 --loss-scale-window 2",
    "bf16": "--bf16",
    "bf16, reduced in bf16": "--bf16 --grad-reduce-in-bf16",
    "fp16": "--fp16",
    "fp16, reduced in fp32": "--fp16 --accumulate-allreduce-grads-in-fp32",
    "start": "--init-method-std 0.05 --embedding-init-method-std 0.3 --make-vocab-size-divisible-by 48 --seed 7 "
    "--logging-level 40",
    "other seed": "--init-method-std 0.05 --embedding-init-method-std 0.3 --make-vocab-size-divisible-by 48 --seed 8",
}
STEPS = 6
LOOKED_AT_ONCE = ("bf16", "bf16, reduced in bf16", "fp16", "fp16, reduced in fp32", "start", "other seed")
"""Cases of which the first step says all."""


@dataclass
class Trace:
    """What one case did: values before each step; gradients are those of the global batch's mean loss."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    fused: list[bool] = field(default_factory=list)
    """Whether one kernel steps all weights, as it is to on GPUs."""
    clips: list[float | None] = field(default_factory=list)
    """By what that kernel divided the gradients."""
    on_gpus: bool = platform.HAS_CUDA
    logging_level: int = 0


def main() -> None:
    (path,) = sys.argv[1:]
    rates.install()
    found = {name: train(words.split(), 1 if name in LOOKED_AT_ONCE else STEPS) for name, words in CASES.items()}
    torch.save({name: vars(trace) for name, trace in found.items()}, path)
    torch.distributed.destroy_process_group()


def train(flags: list[str], steps: int) -> Trace:
    args = harness.start(harness.SMALL, 1, 1, ["--train-iters", str(STEPS), *flags])
    chain = harness.build_chain(args, harness.SMALL)
    plan = single_stage_plan(chain.kinds)
    model = harness.build_model(chain, plan)
    config, overrides = training.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, model, overrides)
    get_model_config(model[0]).grad_scale_func = optimizer.scale_loss
    scheduler = get_optimizer_param_scheduler(optimizer)
    executor, trace = Executor(), Trace(logging_level=logging.getLogger().level)
    for _ in range(steps):
        optimizer.zero_grad()
        harness.run_iteration(model, plan, harness.sample_packs("short"), executor)
        trace.weights.append({name: weight.detach().clone() for name, weight in model[0].named_parameters()})
        trace.gradients.append({name: weight.main_grad.clone() for name, weight in model[0].named_parameters()})
        trace.rates.append(float(optimizer.param_groups[0]["lr"]))
        trace.scales.append(optimizer.get_loss_scale().item())
        optimizer.step()
        trace.fused.append(bool(optimizer.param_groups[0].get("fused")))
        scale = getattr(optimizer.optimizer, "grad_scale", None)
        trace.clips.append(scale if scale is None else scale.item())
        scheduler.step(args.global_batch_size)
    destroy_global_state()
    return trace


if __name__ == "__main__":
    main()
