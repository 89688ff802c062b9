"""Checks of the machine: devices, memory (by the model's sizes, without measuring), the rendezvous of several nodes."""

import contextlib
import errno
import os
import socket
import threading
from argparse import Namespace
from datetime import timedelta

import psutil
import torch

from megatron.vlm import optional, platform
from megatron.vlm.preflight.findings import Note
from omnibal_ext.adapters import NO_ADAPTERS, Adapters, adapter_parameters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.expert_ranks import expert_shares
from omnibal_ext.chain import gradient_mode
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.states import WeightBytes
from omnibal_ext.costs.works import layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.units import GIB, in_bytes

ANSWER_SECONDS = 3


def check_devices(local_ranks: int) -> str:
    """Return the devices in words. Raises UserError for more ranks than GPUs, or GPUs that torch does not see."""
    if not platform.HAS_CUDA:
        if sign := platform.unseen_gpu():
            raise UserError(
                f"{sign}, but torch {torch.__version__} sees no CUDA device: training would run on the CPU; install a "
                "torch built for this driver, or set CUDA_VISIBLE_DEVICES= (empty) if the CPU is meant"
            )
        cores = platform.device_count()
        found = f"{local_ranks} ranks on the CPU, {cores} cores"
        return Note(f"{found}: ranks will wait for each other") if local_ranks > cores else found
    count = platform.device_count()
    if local_ranks > count:
        raise UserError(
            f"{local_ranks} ranks on this node, but torch sees {count} GPUs; lower --nproc-per-node, or see to "
            "CUDA_VISIBLE_DEVICES"
        )
    found = f"{local_ranks} ranks, {count} x {platform.device_name()}"
    unusable = [f"{module} is installed and not used: {why}" for module, why in optional.UNUSABLE.items()]
    return Note("; ".join([found, *unusable])) if unusable else found


def check_rendezvous(endpoint: str) -> str:
    """Return the state of the rendezvous port in words; endpoint: HOST:PORT. Raises UserError if it cannot be used.

    If HOST is this machine, the port must be free, or be another launch's TCPStore.
    """
    host, _, written = endpoint.rpartition(":")
    if not host or not written.isdecimal() or not 0 < int(written) < 2**16:
        raise UserError(f"--rdzv-endpoint {endpoint}: must be HOST:PORT, the first node's name and a free port there")
    port = int(written)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"--rdzv-endpoint {endpoint}: {host} is unknown here ({error.strerror or error})") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return _answers(host, port)
                continue  # not an address of this machine
            return f"{endpoint} is free here"
    return f"{endpoint} is another node's"


def _answers(host: str, port: int) -> str:
    found: list[torch.distributed.TCPStore] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            limit = timedelta(seconds=ANSWER_SECONDS)
            found.append(torch.distributed.TCPStore(host, port, is_master=False, timeout=limit))

    # The timeout covers connecting only; a program that accepts and never answers would block for ever.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    if not found:
        raise UserError(
            f"--rdzv-endpoint {host}:{port}: the port is used by another program; choose another one for all nodes"
        )
    return f"{host}:{port} is open for the other nodes"


def parameters(
    architecture: Architecture, frozen: tuple[str, ...], adapters: Adapters = NO_ADAPTERS
) -> tuple[int, int]:
    """Return (parameters, trained parameters) of the model, without biases of linear layers."""
    of_kind, frozen = (
        analytic_profile(architecture, "h100", {"tiles": 1, "tokens": 1}).parameters,
        adapters.frozen(frozen),
    )
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
    """Return the bytes of weights, gradients and optimizer state on a rank, if pipeline stages have equally many."""
    adapters, expert_parallel = Adapters.of(args), args.expert_model_parallel_size
    total, trained = parameters(architecture, tuple(args.freeze), adapters)
    works = layer_works(architecture, {}, 1)
    experts = sum(works[kind].expert_parameters for kind in architecture.cost_kinds)
    trained_experts = 0 if "llm" in adapters.frozen(args.freeze) else experts
    each = WeightBytes.of(args, args.bf16 or args.fp16)
    tensor, data, needed = args.tensor_model_parallel_size, args.data_parallel_size, 0.0
    for weights, with_gradient, (shards, replicas) in (
        (total - experts, trained - trained_experts, (tensor, data)),
        (experts, trained_experts, expert_shares(tensor, data, expert_parallel)),
    ):
        whole = each.on_a_rank(replicas if args.use_distributed_optimizer else 1)
        needed += ((weights - with_gradient) * each.weight + with_gradient * whole) / shards
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
