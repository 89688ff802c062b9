"""Run under torchrun: a few optimizer steps of generated layouts, against one process's.

training.py compare LAUNCH ANSWERS [flag...]
    for every case the largest difference of any weight, and of the last loss
training.py answers LAUNCH,LAUNCH... ANSWERS [flag...]
    writes one process's, for what these launches ask
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config
from megatron.training import get_args
from torch import Tensor

from megatron.vlm import core_patches
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.plan import Plan, single_stage_plan
from tests.distributed import cases, harness, wide

STEPS = 3
Deal = Callable[[list[Microbatch]], list[Microbatch]]
PACKS = "one of many"


def main() -> None:
    what, names, path, *flags = sys.argv[1:]
    core_patches.patch_distributed_optimizer()
    if what == "answers":
        harness.start(harness.SMALL, 1, 1, flags)
        found = {question: one_process(question) for question in questions(names.split(","))}
        harness.Answers.write(path, found)
        cases.compile_lists()
        print("RESULT " + json.dumps({str(question): loss for question, (loss, _) in found.items()}))
    else:
        launch = cases.TRAINING[names]
        harness.start(harness.SMALL, launch.tensor, launch.pipeline, flags, experts=launch.experts)
        answers = harness.Answers(path)
        executors = harness.executors(harness.open_channels())
        harness.report({str(case): difference(case, answers, launch.pipeline, executors) for case in launch.cases()})
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def questions(names: list[str]) -> list[cases.Question]:
    """All that these launches ask, on packs of which one has tiles."""
    asked = {case.question for name in names for case in cases.TRAINING[name].cases()}
    return sorted({replace(question, packs=PACKS) for question in asked}, key=str)


def one_process(question: cases.Question) -> tuple[float, dict[str, Tensor]]:
    chain = harness.chain_of(get_args(), question)
    plan = single_stage_plan(chain.kinds)
    packs = harness.sample_packs(PACKS, model=question.model)
    loss, weights = train(chain, plan, Executor(plan.schedule), question.reduction, packs, None)
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    if chain.architecture.tied:
        weights["head.linear.weight"] = weights["word_embed.embedding.weight"]
    return loss, weights


def difference(case: cases.Case, answers: harness.Answers, pipeline: int, make_executor: harness.MakeExecutor) -> float:
    args = get_args()
    args.sequence_parallel, args.overlap_grad_reduce = case.sequence_parallel, case.overlap
    args.overlap_param_gather = args.align_param_gather = case.overlap and args.use_distributed_optimizer
    chain = harness.chain_of(args, case.question)
    multiple = args.tensor_model_parallel_size if case.sequence_parallel else 1
    plan = case.plan(chain.kinds, pipeline)
    deal = partial(wide.dealt, seed=case.seed, multiple=multiple, model=chain.architecture) if case.wide else None
    packs = harness.sample_packs(PACKS, 1 if case.wide else multiple, case.question.model)
    microbatches = len(deal(packs)) if deal else len(packs) // args.data_parallel_size
    executor = make_executor(plan.schedule, case.lists(plan, microbatches))
    loss, weights = train(chain, plan, executor, case.question.reduction, packs, deal)
    expected_loss, expected = answers[replace(case.question, packs=PACKS)]
    worst = abs(loss - expected_loss)
    for name, weight in weights.items():
        worst = max(worst, (weight - harness.shard(expected[name], weight)).abs().max().item())
    return worst


def turned(packs: list[Microbatch], step: int) -> list[Microbatch]:
    """Behind the first step, whose reductions do not overlap, the pack with tiles is one rank's last or the other's."""
    turn = (step + 2) % len(packs)
    return packs[turn:] + packs[:turn]


def train(
    chain: harness.Chain, plan: Plan, executor: Executor, reduction: str, packs: list[Microbatch], deal: Deal | None
) -> tuple[float, dict[str, Tensor]]:
    """The last step's loss, and this rank's weights after it; `deal` gives this rank's part of packs."""
    args, model = get_args(), harness.build_model(chain, plan)
    config = OptimizerConfig(
        lr=1e-3, weight_decay=0.05, params_dtype=args.params_dtype, bf16=args.bf16, fp16=args.fp16,
        initial_loss_scale=2.0**12, use_distributed_optimizer=args.use_distributed_optimizer,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, model)
    get_model_config(model[0]).grad_scale_func = optimizer.scale_loss
    loss = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = deal(turned(packs, step)) if deal else turned(packs, step)
        loss = harness.run_iteration(model, plan, mine, executor, reduction, deal is not None)
        done, _, _ = optimizer.step()
        assert done, "the optimizer skipped a step"
    for module in model if args.overlap_param_gather else ():
        module.start_param_sync(force_sync=True)
    return loss, dict(harness.weights_of(model))


if __name__ == "__main__":
    main()
