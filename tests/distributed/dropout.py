"""Run on one rank: with dropout and drop path, every way of recomputing draws what the forward pass drew."""

import sys

import torch
from megatron.core import tensor_parallel
from megatron.training import get_args

from megatron.vlm.pipeline.executor import Executor
from tests.distributed import cases, harness


def main() -> None:
    del sys.argv[1:]
    harness.start(harness.SMALL, 1, 1, ["--hidden-dropout", "0.2", "--attention-dropout", "0.2"])
    expected = run("none", seed=5)
    found = {way: largest_difference(expected, run(way, seed=5)) for way in cases.RECOMPUTE}
    harness.report(found | {"other seed": largest_difference(expected, run("none", seed=6))})
    torch.distributed.destroy_process_group()


def run(recompute: str, seed: int) -> dict[str, torch.Tensor]:
    """Gradients of one iteration."""
    question = cases.Question("small", (), "all", "token")
    chain = harness.build_chain(get_args(), harness.DROPPING)
    plan = cases.Case(question, "1f1b", 1, recompute, False, False, seed=0).plan(chain.kinds, 1)
    model = harness.build_model(chain, plan)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    harness.run_iteration(model, plan, harness.sample_packs(), Executor())
    return harness.gradients(model)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative to the gradient's largest entry."""
    return max(((one[name] - other[name]).abs().max() / one[name].abs().max()).item() for name in one)


if __name__ == "__main__":
    main()
