"""Run under torchrun: every case must yield the loss and gradients of one process.

parity.py LAUNCH ANSWERS [flag...]
    compares the launch's generated cases with the answers; "answers" and "all answers" as the launch write them, on a
    single rank: those that the short suite asks for, or all
"""

import json
import sys

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron.vlm import platform
from omnibal_ext.schedules.actions import Action, counts_of
from omnibal_ext.schedules.schedule import splits_backward
from tests.distributed import cases, harness, wide


def main() -> None:
    name, path, *flags = sys.argv[1:]
    if name.endswith("answers"):
        harness.start(harness.SMALL, 1, 1, flags)
        answers = {question: answer(question) for question in cases.questions(is_long=name.startswith("all"))}
        harness.Answers.write(path, answers)
        cases.compile_lists()
        print("RESULT " + json.dumps({"answers": len(answers)}))
    else:
        launch = (cases.LAUNCHES | cases.TEAMS)[name]
        harness.start(harness.SMALL, launch.tensor, launch.pipeline, flags, experts=launch.experts)
        answers = harness.Answers(path)
        executors = harness.executors(harness.open_channels())
        worst = {str(case): difference(case, answers, launch.pipeline, executors) for case in launch.cases()}
        if launch.wide and launch.ranks > launch.tensor * launch.pipeline * 2:
            film = cases.Question("features", (), "all", "token")
            packs = harness.sample_packs("all", model=film.model)
            worst["numbers of a long film"] = wide.numbers_of_a_long_film(harness.chain_of(get_args(), film), packs)
        harness.report(worst)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def answer(question: cases.Question) -> harness.Result:
    """One process's loss and gradients."""
    chain = harness.chain_of(get_args(), question)
    return harness.reference(chain, harness.sample_packs(question.packs, model=question.model), question.reduction)


def difference(
    case: cases.Case,
    answers: harness.Answers,
    pipeline: int,
    make_executor: harness.MakeExecutor,
) -> float:
    """Largest relative difference of the loss and any gradient."""
    args = get_args()
    args.sequence_parallel = case.sequence_parallel
    args.overlap_grad_reduce = case.overlap
    args.gradient_accumulation_fusion = platform.HAS_TRANSFORMER_ENGINE or case.seed % 2 == 0
    args.delay_wgrad_compute = platform.HAS_TRANSFORMER_ENGINE and splits_backward(case.schedule)
    chain = harness.chain_of(args, case.question)
    plan = case.plan(chain.kinds, pipeline)
    plan.validate()
    model = harness.build_model(chain, plan)
    multiple = args.tensor_model_parallel_size if case.sequence_parallel else 1
    packs = harness.sample_packs(case.question.packs, 1 if case.wide else multiple, case.question.model)
    first, microbatches = packs[: args.data_parallel_size], len(packs) // args.data_parallel_size
    if case.wide:
        packs = wide.dealt(packs, case.seed, multiple, chain.architecture)
        first, microbatches = packs[:1], len(packs)
    lists = case.lists(plan, microbatches)
    executor = make_executor(plan.schedule, lists)
    how = (executor, case.question.reduction, case.wide)
    if case.overlap:
        # Core counts gradients in the first iteration and overlaps from the second, however many packs either has.
        harness.run_iteration(model, plan, first, *how)
        get_model_config(model[0]).finalize_model_grads_func = harness.finalize_what_is_under_way
    loss = harness.run_iteration(model, plan, packs, *how)
    if lists is not None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        ran = executor._postings[counts_of(lists)][rank]
        assert [step for step in ran if isinstance(step, Action)] == lists[rank], "ran other lists than its own"
    return harness.compare(model, answers[case.question], loss)


if __name__ == "__main__":
    main()
