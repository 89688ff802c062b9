"""Run under torchrun: dropout and drop path are one process's, through any cut and with the tower beside the pipeline.

beside_draws.py answers ANSWERS            writes one process's loss and gradients
beside_draws.py compare ANSWERS [flag...]  how far a cut, and every way beside the pipeline, is from these

With dropout each microbatch is encoded by one rank; with drop path alone, under tensor parallelism, by all together.
"""

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.plan import Plan
from tests.distributed import beside, beside_cases, cases, harness

ITERATION = 4
"""The last of two: a tower that runs ahead has encoded its images in the one before."""
FROZEN = ("vit", "projector")
PACKS = 2


@dataclass(frozen=True)
class OneRank(beside_cases.Beside):
    """One rank encodes all images of a microbatch."""

    def _ranks(self, ranks: int, generator: random.Random) -> tuple[int, ...]:
        return (generator.randrange(ranks),)


def main() -> None:
    what, path, *flags = sys.argv[1:]
    tensor = 2 if "--sequence-parallel" in flags else 1
    args = harness.start(harness.SMALL, 1 if what == "answers" else tensor, 1 if what == "answers" else 2, flags)
    if what == "answers":
        results = {asked: one_process(args, *asked) for asked in product((False, True), ((), FROZEN), (3, ITERATION))}
        harness.Answers.write(path, results)
        print("RESULT " + json.dumps({str(asked): result.loss for asked, result in results.items()}))
    else:
        answers, communicator = harness.Answers(path), beside.open_image_channels(2)
        dropout = tensor == 1
        worst = {}
        for freeze in ((), FROZEN):
            expected = answers[dropout, freeze, ITERATION]
            worst |= {
                name: difference(args, dropout, case, expected, communicator) for name, case in ways(dropout, freeze)
            }
        harness.report(worst)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def ways(dropout: bool, freeze: tuple[str, ...]) -> Iterator[tuple[str, cases.Case | beside_cases.Beside]]:
    """A cut, and beside the pipeline every way of keeping, and every mode."""
    question = cases.Question("small", freeze, "all", "token")
    case = cases.Case(question, "1f1b", 1, "mixed", get_args().sequence_parallel, False, seed=5)
    about = f"{'dropout' if dropout else 'drop path'}, {'frozen' if freeze else 'trained'}"
    yield f"{about}: cut", case
    make = OneRank if dropout else beside_cases.Beside
    kinds = [("bubbles", kept) for kept in beside_cases.KEPT]
    for mode, kept in kinds if freeze else [*kinds, ("first", "recomputed")]:
        yield f"{about}: {mode}, {kept}", make(case, mode, kept, True, PACKS)


def chain_of(args: Namespace, dropout: bool, freeze: tuple[str, ...]) -> Chain:
    args.hidden_dropout = args.attention_dropout = 0.3 if dropout else 0.0
    return harness.build_chain(args, harness.DROPPING, freeze)


def packs_of(iteration: int) -> list[Microbatch]:
    packs = harness.sample_packs(multiple=2)[:PACKS]
    return [replace(pack, pack=number, iteration=iteration) for number, pack in enumerate(packs)]


def one_process(args: Namespace, dropout: bool, freeze: tuple[str, ...], iteration: int) -> harness.Result:
    return harness.reference(chain_of(args, dropout, freeze), packs_of(iteration))


def difference(
    args: Namespace, dropout: bool, case: cases.Case | beside_cases.Beside, expected: harness.Result,
    communicator: Communicator,
) -> float:  # fmt: skip
    """The largest relative difference of the loss and any gradient, in the second of two iterations."""
    whole = case if isinstance(case, cases.Case) else case.case
    chain = chain_of(args, dropout, whole.question.freeze)
    plan = whole.plan(chain.kinds, 2) if case is whole else case.plan(chain.kinds, 2, args.tensor_model_parallel_size)
    plan.validate()
    model, executor = harness.build_model(chain, plan), made(plan, communicator)
    loss = 0.0
    for iteration in (ITERATION - 1, ITERATION):
        packs = packs_of(iteration)
        if plan.tower is None:
            loss = harness.run_iteration(model, plan, packs, executor)
        else:
            loss = beside.run_iteration(model, plan, packs, executor, "token", packs_of(iteration + 1), iteration)
    return harness.compare(model, expected, loss)


def made(plan: Plan, communicator: Communicator) -> Executor:
    lists = None if plan.tower is None else plan.build_schedule()
    executor = Executor(plan.schedule, lists=lists, tower=plan.tower)
    executor._communicator = communicator
    return executor


if __name__ == "__main__":
    main()
