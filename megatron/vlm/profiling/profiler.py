"""Measures what a layer of every kind costs at the shapes that training runs: the `Profile` that plans are made from.

1. Transfers and reductions between two ranks (`profiling.transfers`), where there are two.
2. Every kind of layer (`profiling.layer_costs`), as a stage in Megatron's DDP wrapper, so that gradients are
   accumulated as in training. All ranks measure at the same time: they share the machine as they do in training.
3. The optimizer's step as a constant, from all kinds together, and a time for each weight of a kind: layers of many
   small tensors take longer.
4. What an action takes beside its layers (`profiling.action_costs`).
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.vlm import platform
from megatron.vlm.models.chain import Chain
from megatron.vlm.profiling.action_costs import measure_actions
from megatron.vlm.profiling.layer_costs import KindMeasurement
from megatron.vlm.profiling.stopwatch import Stopwatch
from megatron.vlm.profiling.transfers import Links, measure_links
from megatron.vlm.single import single_process
from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.expert_ranks import expert_shares
from omnibal_ext.costs.profile import Profile
from omnibal_ext.costs.work import exchange_costs
from omnibal_ext.costs.works import cost_works

GRADIENT_BYTES = 4  # gradients are reduced in fp32


@dataclass(frozen=True)
class Job:
    """The training run that is profiled for, as far as costs depend on it."""

    preset: str
    vit_budget: int
    llm_budget: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    distributed_optimizer: bool = False
    bf16: bool = False
    frozen: tuple[str, ...] = ()
    steps: int = 5
    expert_parallel: int = 1
    adapters: Adapters = NO_ADAPTERS

    def flags(self) -> list[str]:
        """Megatron's."""
        flags = ["--tensor-model-parallel-size", str(self.tensor_parallel), *["--bf16"] * self.bf16]
        flags += ["--sequence-parallel"] * self.sequence_parallel
        flags += ["--expert-model-parallel-size", str(self.expert_parallel)]
        return flags + (["--freeze", *self.frozen] if self.frozen else self.adapters.size_flags)


def profile_on_this_machine(job: Job, measured_with: dict[str, Any]) -> Profile | None:
    """Start Megatron on this process (or these, under torchrun) and measure; None but on rank 0.

    `measured_with` is recorded as it is.
    """
    with single_process(job.preset, job.flags()) as inputs:
        args, architecture = inputs.args, inputs.architecture
        profile = measure_profile(args, Chain.of(args, architecture), job, measured_with)
        return profile if torch.distributed.get_rank() == 0 else None


def measure_profile(args: Namespace, chain: Chain, job: Job, measured_with: dict[str, Any]) -> Profile:
    """Measure all kinds of layers on this device, with the parallelism and precision of Megatron's `args`."""
    stopwatch, budgets = Stopwatch(job.steps), (job.vit_budget, job.llm_budget)
    links = measure_links(stopwatch)
    kinds = dict.fromkeys(chain.architecture.cost_kinds)
    measured = {kind: KindMeasurement(args, chain, kind, budgets) for kind in kinds}
    trained = {kind: k for kind, k in measured.items() if k.trained}
    seconds = stopwatch.measure({kind: k.runs() for kind, k in measured.items()}, "profiling layers")
    for k in measured.values():
        k.make_room()
    steps = stopwatch.measure({kind: k.optimizer_runs(args) for kind, k in trained.items()})
    action, iteration, host_action = measure_actions(args, chain.architecture, stopwatch)
    stepped = {kind: (k.trained * k.count, steps[kind]["step"][0]) for kind, k in trained.items()}
    per_iteration, per_weight = seconds_of_weights(stepped)
    layers = {
        kind: k.cost(
            seconds[kind],
            weight_bytes(args, job, k),
            step_seconds(job, k.trained, k.dealt, per_weight.get(kind, 0.0), links),
        )
        for kind, k in measured.items()
    }
    a_number = args.params_dtype.itemsize * links.transfer_seconds_per_byte
    works = cost_works(chain.architecture, job.vit_budget, job.llm_budget, job.tensor_parallel, job.expert_parallel)
    exchanges = {kind: exchange_costs(works[kind], job.tensor_parallel, a_number) for kind in layers}
    layers = {kind: replace(cost, **exchanges[kind]) for kind, cost in layers.items()}
    return Profile(
        model=chain.architecture.name,
        model_hash=chain.architecture.hash,
        chain=chain.kinds,
        feature_layers=chain.architecture.vision.feature_layers,
        features_joined=bool(chain.architecture.vision.side_by_side),
        carried_after=chain.architecture.carried_after(job.tensor_parallel, args.sequence_parallel),
        layers_apart=chain.architecture.layers_apart,
        layers=layers,
        vit_budget=job.vit_budget,
        llm_budget=job.llm_budget,
        parameters={kind: k.parameters for kind, k in measured.items()},
        tensor_model_parallel_size=job.tensor_parallel,
        expert_model_parallel_size=job.expert_parallel,
        frozen=job.adapters.frozen(job.frozen),
        lora_rank=job.adapters.rank,
        lora_targets=job.adapters.targets,
        device=str(measured_with.get("device", "")),
        dtype=str(args.params_dtype).removeprefix("torch."),
        transfer_seconds_per_byte=links.transfer_seconds_per_byte,
        transfer_latency_seconds=links.transfer_latency_seconds,
        action_seconds=action,
        host_action_seconds=host_action,
        iteration_seconds=per_iteration + iteration,
        overhead_bytes=platform.overhead_bytes(),
        measured_with=measured_with,
        notes={"disturbed": stopwatch.disturbed, "reduction_seconds_per_byte": links.reduction_seconds_per_byte},
    )


def weight_bytes(args: Namespace, job: Job, kind: KindMeasurement) -> float:
    """Of one layer: its weights, and for those that are trained an fp32 gradient and Adam's state.

    fp32: 4 + 4 + 8. Half precision: 2 + 4 + (4 master + 8); the distributed optimizer divides the state by the ranks
    that have the same weights.
    """
    half = args.params_dtype != torch.float32
    state = 12 if half else 8
    held = _held_alike(job, kind.trained, kind.dealt)
    shares = sum(weights / (ranks if job.distributed_optimizer else 1) for weights, ranks in held)
    return kind.weights * (2 if half else 4) + kind.trained * GRADIENT_BYTES + state * shares


def step_seconds(job: Job, trained: float, dealt: float, per_weight: float, links: Links) -> float:
    """Optimizer step and ring all-reduce of the gradients of a rank's trained weights, some of which are of dealt
    experts; nothing of it overlaps with work."""
    seconds = 0.0
    for weights, ranks in _held_alike(job, trained, dealt):
        reduction = GRADIENT_BYTES * links.reduction_seconds_per_byte * 2 * (ranks - 1) / ranks
        seconds += weights * (per_weight / (ranks if job.distributed_optimizer else 1) + reduction)
    return seconds


def _held_alike(job: Job, trained: float, dealt: float) -> tuple[tuple[float, float], ...]:
    """Weights, and how many ranks have the same: of all but dealt experts, and of those."""
    _, alike = expert_shares(job.tensor_parallel, job.data_parallel, job.expert_parallel)
    return (trained - dealt, job.data_parallel), (dealt, alike)


def seconds_of_weights(stepped: Mapping[str, tuple[float, float]]) -> tuple[float, dict[str, float]]:
    """(constant, of one weight of each kind), from (weights, seconds) of an optimizer's step of each kind."""
    constant, _ = fit_line(list(stepped.values()))
    return constant, {kind: max(0.0, seconds - constant) / weights for kind, (weights, seconds) in stepped.items()}


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(constant, slope), neither negative, of seconds over weights by least squares."""
    weights, seconds = np.array(points).T
    if len(points) > 1:
        slope, constant = np.polyfit(weights, seconds, 1)
        if slope >= 0 and constant >= 0:
            return float(constant), float(slope)
    return 0.0, float(weights @ seconds / (weights @ weights))
