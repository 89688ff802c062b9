"""Measurement of every kind of layer at the shapes of training: the `Profile` that the planner reads.

1. Transfers and reductions between two ranks (`profiling.action_costs`), where there are two.
2. Every kind of layer (`profiling.layer_costs`), as a stage in Megatron's DDP wrapper, so that gradients are
   accumulated as in training. All ranks measure at the same time, since they share the machine in training too.
3. The optimizer step: a constant, fitted over all kinds, and seconds per weight of each kind, since layers of many
   small tensors take longer.
4. The overhead of an action (`profiling.action_costs`).
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.vlm import platform
from megatron.vlm.models.chain import Chain
from megatron.vlm.profiling.action_costs import TransferCosts, measure_actions, measure_transfers
from megatron.vlm.profiling.float8 import float8_gains
from megatron.vlm.profiling.layer_costs import KindMeasurement
from megatron.vlm.profiling.stopwatch import Stopwatch
from megatron.vlm.single import single_process
from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.expert_ranks import expert_shares
from omnibal_ext.chain import chain_kind
from omnibal_ext.costs.profile import Profile
from omnibal_ext.costs.states import WeightBytes
from omnibal_ext.costs.works import layer_works
from omnibal_ext.modalities.modality import LANGUAGE, Budgets
from omnibal_ext.modalities.work import exchange_costs

GRADIENT_BYTES = 4  # gradients are reduced in fp32


@dataclass(frozen=True)
class ProfileJob:
    """Settings of a training run on which costs depend."""

    preset: str
    budgets: Budgets
    _: KW_ONLY
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    distributed_optimizer: bool = False
    bf16: bool = False
    frozen: tuple[str, ...] = ()
    steps: int = 5
    expert_parallel: int = 1
    adapters: Adapters = NO_ADAPTERS
    states: tuple[str, ...] = ()
    """Flags of a precision-aware optimizer."""

    def flags(self) -> list[str]:
        """Return Megatron's flags for these settings."""
        flags = ["--tensor-model-parallel-size", str(self.tensor_parallel), *["--bf16"] * self.bf16]
        flags += ["--sequence-parallel"] * self.sequence_parallel
        flags += ["--expert-model-parallel-size", str(self.expert_parallel)]
        flags += ["--use-distributed-optimizer", *self.states] if self.states else []
        return flags + (["--freeze", *self.frozen] if self.frozen else self.adapters.size_flags)


def profile_on_this_machine(job: ProfileJob, measured_with: dict[str, Any]) -> Profile | None:
    """Measure `job`'s profile, with Megatron started on this process or torchrun's; return it on rank 0, else None.

    `measured_with` is stored in the profile.
    """
    with single_process(job.preset, job.flags()) as inputs:
        args, architecture = inputs.args, inputs.architecture
        profile = measure_profile(args, Chain.of(args, architecture), job, measured_with)
        return profile if torch.distributed.get_rank() == 0 else None


def measure_profile(args: Namespace, chain: Chain, job: ProfileJob, measured_with: dict[str, Any]) -> Profile:
    """Measure layers, transfers and optimizer step, under the parallelism and precision of `args`; collective."""
    stopwatch, budgets = Stopwatch(job.steps), job.budgets
    transfers = measure_transfers(stopwatch)
    kinds = dict.fromkeys(chain.architecture.cost_kinds)
    measured = {kind: KindMeasurement(args, chain, kind, budgets) for kind in kinds}
    trained = {kind: k for kind, k in measured.items() if k.trained}
    seconds = stopwatch.measure({kind: k.runs() for kind, k in measured.items()}, "profiling layers")
    for k in measured.values():
        k.release()
    steps = stopwatch.measure({kind: k.optimizer_runs(args) for kind, k in trained.items()})
    action, iteration, host_action = measure_actions(args, chain.architecture, stopwatch)
    stepped = {kind: (k.trained * k.count, steps[kind]["step"][0]) for kind, k in trained.items()}
    per_iteration, per_weight = seconds_of_weights(stepped)
    layers = {
        kind: k.cost(
            seconds[kind],
            weight_bytes(args, job, k),
            step_seconds(job, k.trained, k.trained_experts, per_weight.get(kind, 0.0), transfers),
        )
        for kind, k in measured.items()
    }
    seconds_per_number = args.params_dtype.itemsize * transfers.transfer_seconds_per_byte
    works = layer_works(chain.architecture, budgets, job.tensor_parallel, job.expert_parallel)
    exchanges = {kind: exchange_costs(works[kind], job.tensor_parallel, seconds_per_number) for kind in layers}
    layers = {kind: replace(cost, **exchanges[kind]) for kind, cost in layers.items()}
    takes = args.params_dtype != torch.float32 and chain.architecture.language.takes_float8
    float8 = {
        kind: float8_gains(k.stage, layers[kind], works[kind].tokens, job.steps)
        for kind, k in measured.items()
        if takes and platform.multiplies_float8() and chain_kind(kind) == LANGUAGE.kinds[1] and k.mode == "trained"
    }
    return Profile(
        model=chain.architecture.name,
        model_hash=chain.architecture.hash,
        chain=chain.kinds,
        feature_layers=chain.architecture.vision.feature_layers,
        features_joined=bool(chain.architecture.vision.side_by_side),
        carried_after=chain.architecture.carried_after(job.tensor_parallel, args.sequence_parallel),
        layers_apart=chain.architecture.layers_apart,
        layers=layers,
        budgets=budgets,
        parameters={kind: k.parameters for kind, k in measured.items()},
        tensor_model_parallel_size=job.tensor_parallel,
        expert_model_parallel_size=job.expert_parallel,
        trained=job.adapters.trained(job.frozen),
        device=str(measured_with.get("device", "")),
        dtype=str(args.params_dtype).removeprefix("torch."),
        transfer_seconds_per_byte=transfers.transfer_seconds_per_byte,
        transfer_latency_seconds=transfers.transfer_latency_seconds,
        action_seconds=action,
        host_action_seconds=host_action,
        iteration_seconds=per_iteration + iteration,
        overhead_bytes=platform.overhead_bytes(),
        measured_with=measured_with,
        notes={
            "disturbed": stopwatch.disturbed,
            "reduction_seconds_per_byte": transfers.reduction_seconds_per_byte,
            **({"float8": float8} if any(float8.values()) else {}),
        },
    )


def weight_bytes(args: Namespace, job: ProfileJob, kind: KindMeasurement) -> float:
    """Return a rank's bytes of a layer's weights, gradients and Adam state, which the distributed optimizer shards."""
    each = WeightBytes.of(args, args.params_dtype != torch.float32)
    replicated = _replicas(job, kind.trained, kind.trained_experts)
    states = sum(weights / (ranks if job.distributed_optimizer else 1) for weights, ranks in replicated)
    return kind.weights * each.weight + kind.trained * each.gradient + each.state * states


def step_seconds(job: ProfileJob, trained: float, experts: float, per_weight: float, transfers: TransferCosts) -> float:
    """Return a layer's seconds of optimizer step and gradient ring all-reduce, one after the other, on a rank.

    trained, experts: its trained weights, and the expert-parallel ones among them; per_weight: seconds of the step.
    """
    seconds = 0.0
    for weights, ranks in _replicas(job, trained, experts):
        reduction = GRADIENT_BYTES * transfers.reduction_seconds_per_byte * 2 * (ranks - 1) / ranks
        seconds += weights * (per_weight / (ranks if job.distributed_optimizer else 1) + reduction)
    return seconds


def _replicas(job: ProfileJob, trained: float, experts: float) -> tuple[tuple[float, float], ...]:
    """Return (weights, number of ranks with the same ones) of all but the experts, then of the experts."""
    _, replicas = expert_shares(job.tensor_parallel, job.data_parallel, job.expert_parallel)
    return (trained - experts, job.data_parallel), (experts, replicas)


def seconds_of_weights(stepped: Mapping[str, tuple[float, float]]) -> tuple[float, dict[str, float]]:
    """Fit optimizer steps, {kind: (weights, seconds)}; return (constant, {kind: further seconds per weight})."""
    constant, _ = fit_line(list(stepped.values()))
    return constant, {kind: max(0.0, seconds - constant) / weights for kind, (weights, seconds) in stepped.items()}


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (constant, slope), neither negative, to (weights, seconds) by least squares."""
    weights, seconds = np.array(points).T
    if len(points) > 1:
        slope, constant = np.polyfit(weights, seconds, 1)
        if slope >= 0 and constant >= 0:
            return float(constant), float(slope)
    return 0.0, float(weights @ seconds / (weights @ weights))
