"""Run on two pipeline ranks: one iteration in half precision against fp32 on the same rounded weights.

Prints by precision and schedule the largest difference of the loss, and of any gradient relative to its weight's
largest, in units of the precision's last bit. The loss is scaled as Megatron's loop has it: its function is set on the
first chunk's configuration, gradients carry the scale.
"""

import sys
from argparse import Namespace
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.pipeline.stage import Stage
from tests.distributed import cases, harness
from tests.languages import altered
from tests.media import seen, with_images

BITS = {torch.bfloat16: 8, torch.float16: 11}
LOSS_SCALE = 2.0**12
SCHEDULES = (("1f1b", 2), ("zb_h1", 2))

FEW = replace(
    harness.EXPERTS,
    name="few experts",
    language=altered(harness.EXPERTS.language, experts=replace(harness.EXPERTS.language.experts, count=5)),
)
"""A token whose experts are nearly as likely may go through others than in fp32: among few, in fp16, none does."""
harness.MODELS[FEW.name] = FEW
QUESTION = cases.Question("", (), "all", "square")
MODELS = (("small", torch.bfloat16), ("small", torch.float16), (FEW.name, torch.float16))


def main() -> None:
    del sys.argv[1:]
    args, worst = harness.start(harness.SMALL, 1, 2), {}
    for model, dtype in MODELS:
        expected = in_full_precision(args, model, dtype)
        for schedule, chunks in SCHEDULES:
            loss, gradient = differences(args, model, dtype, schedule, chunks, expected)
            name = f"{model} {str(dtype).removeprefix('torch.')} {schedule} {chunks}"
            worst |= {f"{name}: loss": loss, f"{name}: gradients": gradient}
    harness.report(worst)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def differences(
    args: Namespace, name: str, dtype: torch.dtype, schedule: str, chunks: int, expected: harness.Result
) -> tuple[float, float]:
    """Of the loss and of the gradients, in units of the last bit."""
    chain = in_precision(args, name, dtype)
    chain.language.gradient_accumulation_fusion = True
    plan = cases.Case(QUESTION, schedule, chunks, "mixed", False, False, seed=chunks).plan(chain.kinds, 2)
    model = harness.build_model(chain, plan)
    get_model_config(model[0]).grad_scale_func = lambda loss: loss * LOSS_SCALE
    loss = harness.run_iteration(model, plan, rounded_packs(name, dtype), Executor(schedule), QUESTION.reduction)
    unit, worst = 2.0 ** -BITS[dtype], 0.0
    for weight, mine in harness.gradients(model).items():
        wanted = expected.gradients[weight]
        worst = max(worst, ((mine / LOSS_SCALE - wanted).abs().max() / wanted.abs().max()).item())
    return abs(loss - expected.loss) / unit, worst / unit


def in_full_precision(args: Namespace, name: str, dtype: torch.dtype) -> harness.Result:
    """Loss and gradients of one process in fp32, of the weights that a chain of `dtype` starts with."""
    chain = in_precision(args, name, dtype)
    stage = Stage(chain, 0, len(chain.kinds))
    weights = {name: weight.detach().float() for name, weight in stage.named_parameters()}
    exact = in_precision(args, name, torch.float32)
    return harness.reference(exact, rounded_packs(name, dtype), QUESTION.reduction, weights)


def in_precision(args: Namespace, name: str, dtype: torch.dtype) -> harness.Chain:
    args.params_dtype, args.bf16, args.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    args.accumulate_allreduce_grads_in_fp32 = True
    return harness.build_chain(args, harness.MODELS[name])


def rounded_packs(name: str, dtype: torch.dtype) -> list[Microbatch]:
    packs = harness.sample_packs(model=name)
    return [with_images(pack, values=seen(pack).values.to(dtype).float()) for pack in packs]


if __name__ == "__main__":
    main()
