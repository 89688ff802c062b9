"""A few optimizer steps with the tower beside the pipeline, run under torchrun, and what must not change them.

beside_training.py answers ANSWERS          writes one process's last loss and weights
beside_training.py compare ANSWERS          for every model: how far all weights are from those; 0 where runs are
    equal to the bit: once more, with evaluations in between, and with all E first and all V last
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain as joined

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config
from megatron.training import get_args
from torch import Tensor

from megatron.vlm import core_patches
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.encoding import ToEncode
from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.plan import Plan
from tests.distributed import beside, beside_cases, cases, harness, training

QUESTIONS = (
    cases.Question("small", (), training.PACKS, "token"),
    cases.Question("features", ("llm",), training.PACKS, "square"),
    cases.Question("native", ("vit", "projector"), training.PACKS, "token"),
)
"""The tower of the last is frozen, and runs ahead."""
MICROBATCHES = 4


def main() -> None:
    what, path, *flags = sys.argv[1:]
    core_patches.patch_distributed_optimizer()
    if what == "answers":
        harness.start(harness.SMALL, 1, 1, flags)
        found = {question: training.one_process(question) for question in QUESTIONS}
        harness.Answers.write(path, found)
        print("RESULT " + json.dumps({str(question): loss for question, (loss, _) in found.items()}))
    else:
        harness.start(harness.SMALL, 2, 2, flags)
        answers, communicator = harness.Answers(path), beside.open_image_channels(2)
        found = {}
        for question in QUESTIONS:
            measured = differences(question, answers[question], communicator)
            found |= {f"{question.model}: {name}": value for name, value in measured.items()}
        harness.report(found)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def differences(
    question: cases.Question, answer: tuple[float, dict[str, Tensor]], communicator: Communicator
) -> dict[str, float]:
    chain, plan = planned(question)
    loss, model = train(chain, plan, communicator, question.reduction)
    weights, worst = dict(harness.weights_of(model)), farthest(loss, model, answer)
    found = {"one process": worst}
    found["once more, evaluated"] = unlike(
        weights, train(chain, plan, communicator, question.reduction, evaluates=True)[1]
    )
    if plan.tower is not None and plan.tower.mode == "bubbles":
        found["all first and last"] = unlike(
            weights, train(chain, all_first(plan), communicator, question.reduction)[1]
        )
    return found


def planned(question: cases.Question) -> tuple[Chain, Plan]:
    """Some ranks encode some microbatches, at any place in the lists."""
    args, chain = get_args(), harness.chain_of(get_args(), question)
    case = cases.Case(question, "1f1b", 1, "none", False, False, 5)
    beside_case = beside_cases.Beside(case, "bubbles", "kept", False, MICROBATCHES // args.data_parallel_size)
    return chain, beside_case.plan(chain.kinds, 2, args.tensor_model_parallel_size)


def worst(
    question: cases.Question,
    answers: harness.Answers,
    communicator: Communicator,
    executor_of: Callable[..., Executor],
) -> float:
    """How far the weights are from one process's, with other executors."""
    chain, plan = planned(question)
    return farthest(*train(chain, plan, communicator, question.reduction, executor_of=executor_of), answers[question])


def farthest(loss: float, model: list[torch.nn.Module], answer: tuple[float, dict[str, Tensor]]) -> float:
    weights = [(weight, harness.shard(answer[1][name], weight)) for name, weight in harness.weights_of(model)]
    return max(abs(loss - answer[0]), *((weight - expected).abs().max().item() for weight, expected in weights))


def all_first(plan: Plan) -> Plan:
    assert plan.tower is not None
    tower = replace(plan.tower, mode="first")
    lists = beside_cases.woven(plan.schedule, 1, plan.pipeline_model_parallel_size, tower, random.Random(0))
    return replace(plan, tower=tower, lists=tuple(" ".join(action.word for action in actions) for actions in lists))


def unlike(weights: dict[str, Tensor], model: list[torch.nn.Module]) -> float:
    found = dict(harness.weights_of(model))
    assert found.keys() == weights.keys()
    return float(sum(not torch.equal(found[name], weight) for name, weight in weights.items()))


def train(
    chain: Chain, plan: Plan, communicator: Communicator, reduction: str, evaluates: bool = False,
    executor_of: Callable[..., Executor] = Executor,
) -> tuple[float, list[torch.nn.Module]]:  # fmt: skip
    plan.validate()
    args, model = get_args(), harness.build_model(chain, plan)
    rank, ranks = parallel_state.get_data_parallel_rank(), args.data_parallel_size
    executor = executor_of(plan.schedule, lists=plan.build_schedule(), tower=plan.tower)
    executor._communicator = communicator
    options = {"use_distributed_optimizer": args.use_distributed_optimizer, "params_dtype": args.params_dtype}
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.05, **options), model)
    get_model_config(model[0]).grad_scale_func = optimizer.scale_loss
    packs, loss = harness.sample_packs(training.PACKS, 1, chain.architecture.name), 0.0

    def all_parts() -> Iterator[Microbatch]:
        yield from joined.from_iterable(
            beside.parts_of(plan, training.turned(packs, step)[rank::ranks]) for step in range(training.STEPS + 1)
        )

    stream = all_parts()
    for step in range(training.STEPS):
        optimizer.zero_grad()
        run = partial(executor, images=ToEncode(stream))
        loss = harness.run_iteration(model, plan, training.turned(packs, step), run, reduction)
        done, _, _ = optimizer.step()
        assert done, "the optimizer skipped a step"
        if evaluates:  # as many packs as no plan has lists for
            run = partial(executor, images=ToEncode(beside.parts_of(plan, packs[:3])), forward_only=True)
            with torch.no_grad():
                harness.run_iteration(model, plan, packs[:3], run)
    for module in model if args.overlap_param_gather else ():
        module.start_param_sync(force_sync=True)
    beside.check_copies(executor, model)
    return loss, model


if __name__ == "__main__":
    main()
