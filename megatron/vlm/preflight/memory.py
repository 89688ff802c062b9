"""Checks that a run fits into memory, from the model's sizes, without measuring."""

import os
from argparse import Namespace

import psutil

from megatron.vlm import platform
from megatron.vlm.preflight.findings import Note
from omnibal_ext.adapters import NO_ADAPTERS, Adapters, adapter_parameters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.expert_ranks import expert_shares
from omnibal_ext.chain import gradient_mode
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.works import layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.units import GIB, in_bytes


def parameters(
    architecture: Architecture, frozen: tuple[str, ...], adapters: Adapters = NO_ADAPTERS
) -> tuple[int, int]:
    """(parameters, trained parameters) of the model, without biases of linear layers."""
    of_kind, frozen = analytic_profile(architecture, "h100", 1, 1).parameters, adapters.frozen(frozen)
    added = adapter_parameters(architecture, adapters)
    kinds = architecture.cost_kinds
    more = sum(int(added.get(kind, 0)) for kind in kinds)
    total = sum(of_kind[kind] for kind in kinds)
    trained = sum(of_kind[kind] for kind in kinds if gradient_mode(kind, frozen) == "trained")
    return total + more, trained + more


def check_memory(args: Namespace, architecture: Architecture, plan: Plan, memory_gib: float | None) -> str:
    """Return what the fullest rank needs and has: by the plan, else weights, gradients and optimizer state only.

    Raises UserError if it needs more than `memory_gib`, or than the device has.
    """
    has = platform.device_memory()
    limit = has if memory_gib is None else memory_gib * GIB
    limited = f"the device has {in_bytes(has)}" if memory_gib is None else f"--memory-gib is {memory_gib:.4g} GiB"
    if peaks := plan.predicted.get("stage_peak_bytes"):
        needs, what, rank = max(peaks), "the plan predicts", f"pipeline rank {peaks.index(max(peaks))}"
    else:
        needs, rank = _state_bytes(args, architecture), "a rank"
        what = "weights, gradients and optimizer state need at least"
    found = f"{what} {in_bytes(needs)} on {rank}, {limited}"
    if needs > limit:
        remedies = ["raise --tensor-model-parallel-size or --pipeline-model-parallel-size"]
        if args.data_parallel_size > 1 and not args.use_distributed_optimizer:
            remedies.append("add --use-distributed-optimizer")
        raise UserError(f"model {architecture.name!r}: {found}; {', or '.join(remedies)}")
    if memory_gib is not None and limit > has:
        return Note(f"{found}, but the device has {in_bytes(has)}")
    return found


def _state_bytes(args: Namespace, architecture: Architecture) -> float:
    """Bytes of weights, gradients and optimizer state on a rank, if pipeline stages have equally many."""
    adapters, expert_parallel = Adapters.of(args), args.expert_model_parallel_size
    total, trained = parameters(architecture, tuple(args.freeze), adapters)
    works = layer_works(architecture, 1, 1, 1)
    experts = sum(works[kind].expert_parameters for kind in architecture.cost_kinds)
    trained_experts = 0 if "llm" in adapters.frozen(args.freeze) else experts
    half = args.bf16 or args.fp16
    weight, gradient, state = (2, 4, 12) if half else (4, 4, 8)
    tensor, data, needed = args.tensor_model_parallel_size, args.data_parallel_size, 0.0
    for weights, with_gradient, (shards, replicas) in (
        (total - experts, trained - trained_experts, (tensor, data)),
        (experts, trained_experts, expert_shares(tensor, data, expert_parallel)),
    ):
        states = state / (replicas if args.use_distributed_optimizer else 1)
        needed += (weights * weight + with_gradient * (gradient + states)) / shards
    return needed / args.pipeline_model_parallel_size


def check_host_memory(args: Namespace, architecture: Architecture, checkpoint: int) -> str:
    """Return what the node's memory must hold: its ranks if they train on the CPU, else a checkpoint being written.

    Raises UserError if it cannot.
    """
    available, local = psutil.virtual_memory().available, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if platform.HAS_CUDA:
        buffered = checkpoint * local / args.world_size if args.save else 0
        found = f"{in_bytes(available)} available, a checkpoint takes {in_bytes(buffered)} of it while it is saved"
        return Note(f"{found}: not enough") if buffered > available else found
    needs = local * _state_bytes(args, architecture)
    found = f"{local} ranks on the CPU need at least {in_bytes(needs)}, {in_bytes(available)} available"
    if needs > available:
        raise UserError(f"model {architecture.name!r}: {found}; use GPUs or a smaller model")
    return found
