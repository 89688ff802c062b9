"""The ranks' side of `two_ranks`: real stages, executor, wrappers and optimizer, without files and logging."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training.training import get_megatron_optimizer_config

from benchmarks.two_ranks import Shape
from megatron.vlm.kept import KeptBytes
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.profiler import Job, profile_on_this_machine
from megatron.vlm.synthetic import synthetic_pack
from omnibal_ext import architectures
from omnibal_ext.plan import Plan
from tests.distributed import harness


def measure(shape: Shape, order: dict[str, Any]) -> Any:
    """A profile's record, or what training each case took; the same on both ranks but for the profile."""
    torch.set_num_threads(1)
    architectures.PRESETS[shape.name] = shape.architecture
    if "cases" in order:
        return _train_all(shape, order["cases"], order["rounds"])
    profile = profile_on_this_machine(Job(shape.name, shape.vit_budget, shape.llm_budget, steps=order["steps"]), {})
    return profile.to_record() if profile else None


def _train_all(shape: Shape, cases: Sequence[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    harness.MODELS[shape.name] = shape.architecture
    args = harness.start(shape.architecture, 1, 2)
    chain = harness.build_chain(args, shape.architecture)
    jobs = []
    for case in cases:
        plan = Plan.from_record(case["plan"])
        packs = [synthetic_pack(shape.architecture, tiles, lengths) for tiles, lengths in case["packs"]]
        jobs.append(_Training(args, harness.build_model(chain, plan), plan, packs))
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(rounds):
        for job, taken in zip(jobs, seconds, strict=True):
            torch.distributed.barrier()
            started = time.perf_counter()
            job.iterate()
            taken.append(time.perf_counter() - started)
    peaks = [job.peak_bytes() for job in jobs]
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, (seconds, peaks))
    torch.distributed.destroy_process_group()
    (first, first_peaks), (second, second_peaks) = everyone
    return [
        {"seconds": [max(pair) for pair in zip(a, b, strict=True)], "peak_bytes": [p, q]}
        for a, b, p, q in zip(first, second, first_peaks, second_peaks, strict=True)
    ]


class _Training:
    """One case, ready to iterate."""

    def __init__(self, args: Any, model: list[Any], plan: Plan, packs: Sequence[Microbatch]) -> None:
        self.model, self.plan, self.packs = model, plan, packs
        self.executor = Executor(plan.schedule)
        config, overrides = get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(
            config, model, overrides, use_gloo_process_groups=args.use_gloo_process_groups
        )

    def iterate(self) -> None:
        """What Megatron's `train_step` does."""
        self.optimizer.zero_grad()
        harness.run_iteration(self.model, self.plan, self.packs, self.executor)
        self.optimizer.step()

    def peak_bytes(self) -> float:
        """Counted over one more iteration."""
        weights = [weight for chunk in self.model for weight in chunk.parameters()]
        with KeptBytes(weights) as kept:
            harness.run_iteration(self.model, self.plan, self.packs, self.executor)
        state = [t for one in _optimizers(self.optimizer) for values in one.state.values() for t in values.values()]
        tensors = [*weights, *(weight.main_grad for weight in weights), *filter(torch.is_tensor, state)]
        return float(kept.peak + sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield one.optimizer
