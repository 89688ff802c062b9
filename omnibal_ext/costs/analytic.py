"""Profiles without a device: operation counts over published peaks, with the efficiencies stated here.

A measured profile replaces an analytic one line by line; the two have the same fields. What layers ask for is counted
by `works.layer_works`; of it, on one of t tensor-parallel ranks:

    attention   2.5 times its operations backward (FlashAttention-2, arXiv 2307.08691)
    links       two all-reduces of n h 2 bytes forward, two backward, each 2 (t - 1) / t times its bytes (Megatron-LM,
                arXiv 2104.04473)
    experts     dealt over e of the t d ranks that hold a layer: what a token's experts take and give crosses to other
                ranks, (e - 1) / e of it where all are chosen alike, those of the node and of others at once
    weights     2 bytes a weight, 4 its gradient, 12 optimizer state, the last spread over d data-parallel ranks by the
                distributed optimizer; those of dealt experts are 1 / e on a rank, and spread over t d / e
    frozen      no gradients of weights: their matrices, bytes and optimizer step are left out; what is kept is counted
                as if they were trained (an upper bound), though no linear layer keeps its input: there is nothing that
                is cheap to compute again. Idle layers have no backward and keep nothing.
    adapted     as frozen, and beside every matrix two of a low rank (`adapters`): what the first gives is kept, and so
                is what enters, but not what only weights without adapters ask for. What the matrix gives is read and
                written once more to be added to, and its gradient read twice; what enters is read once forward, and its
                gradient passed 5 times
    teams       ranks that run a pack together are of one node: what they exchange of a token, by its links
    host        a layer is asked for in these seconds, which are those of no device (`HOST_SECONDS`)
"""

from dataclasses import dataclass, replace
from typing import Any

from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.expert_ranks import check_expert_ranks, expert_shares
from omnibal_ext.architectures.layer import Layer
from omnibal_ext.chain import VISION_KINDS, GradientMode, chain_kind, gradient_mode
from omnibal_ext.costs.adapted import AdaptersWork, adapters_works
from omnibal_ext.costs.profile import LayerCost, Profile
from omnibal_ext.costs.work import BYTES, Work, exchange_costs
from omnibal_ext.costs.works import IMAGE_PATCHES, layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.units import GIB

GPUS_A_NODE = 8
OVERHEAD_BYTES = 4.0 * GIB
"""Of a GPU: driver context, communication buffers, fragmentation, which an empty job already takes."""
EXPOSED_REDUCTION = 0.25
"""Share of gradient reduction and weight gathering that does not hide behind work (--overlap-grad-reduce)."""
HOST_SECONDS = {"vit": (7e-4, 6e-4), "llm": (1e-3, 8e-4)}
"""What a host takes to ask for a layer, forward and backward (benchmarks/host.py, on one core of a shared server)."""
HOST_SECONDS_OF_ADAPTERS = 1.6e-4
"""The same for those of a matrix, forward or backward: nine launches in all, at the pace of the layers' own."""
BACKWARD_ATTENTION = 2.5
"""Operations of attention backward over forward (FlashAttention-2)."""


@dataclass(frozen=True, slots=True)
class _Ranks:
    """How a layer is shared out."""

    tensor: int
    data: int
    experts: int
    """Ranks that the experts of a layer are dealt over; 1: they are cut over the tensor-parallel ranks."""
    distributed_optimizer: bool

    def weights(self, work: Work) -> tuple[tuple[float, float], ...]:
        """Weights that a rank has, and ranks that have the same: of all but experts, of experts."""
        others, experts = work.parameters - work.expert_parameters, work.expert_parameters
        shares, alike = expert_shares(self.tensor, self.data, self.experts)
        return (others / work.shares(self.tensor), self.data), (experts / shares, alike)


@dataclass(frozen=True, slots=True)
class Device:
    """Published peaks of one GPU, and the share of each that large bf16 layers reach."""

    name: str
    flops: float
    """Dense bf16 operations a second (vendor's data sheet)."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes a second (data sheet)."""
    node_bandwidth: float
    """Bytes a second and direction to the GPUs of the node (data sheet: half of the two-way figure)."""
    network_bandwidth: float
    """Bytes a second and GPU between nodes: one 200 or 400 Gb/s adapter a GPU, as in the vendor's reference systems."""
    matrix_efficiency: float
    attention_efficiency: float
    bandwidth_efficiency: float = 0.8
    overhead_bytes: float = OVERHEAD_BYTES


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 80e9, 2.039e12, 300e9, 25e9, 0.70, 0.50),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, 0.60, 0.45),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 0.60, 0.45),
    )
}


def analytic_profile(
    architecture: Architecture,
    device: str,
    vit_budget: int,
    llm_budget: int,
    tensor_model_parallel_size: int = 1,
    data_parallel_size: int = 1,
    distributed_optimizer: bool = True,
    frozen: tuple[str, ...] = (),
    measured: Device | None = None,
    expert_model_parallel_size: int = 1,
    adapters: Adapters = NO_ADAPTERS,
    replica_ranks: int = 0,
) -> Profile:
    """The profile of a model on a100, h100 or h200 at packed shapes (`vit_budget` tiles, `llm_budget` tokens).

    `measured` takes the place of the efficiencies stated here (`measured_device`). Seconds at the budget are those of a
    pack that is one sample; the fits price others. Above 0, `replica_ranks` (pipeline x tensor) add what a tower beside
    the pipeline costs. Raises UserError for unknown devices, sizes under one, and experts
    that cannot be dealt or cut so.
    """
    if device not in DEVICES:
        raise UserError(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}, or measure a profile")
    sizes = (vit_budget, llm_budget, tensor_model_parallel_size, data_parallel_size, expert_model_parallel_size)
    if min(sizes) < 1:
        raise UserError(f"budgets and parallel sizes must be at least 1, got {', '.join(map(str, sizes))}")
    check_expert_ranks(architecture, expert_model_parallel_size, (tensor_model_parallel_size, data_parallel_size))
    gpu, t, d = measured or DEVICES[device], tensor_model_parallel_size, data_parallel_size
    ranks = _Ranks(t, d, expert_model_parallel_size, distributed_optimizer)
    works, vision = (
        layer_works(architecture, vit_budget, llm_budget, t, expert_model_parallel_size),
        architecture.vision,
    )
    for name, layer in dict.fromkeys(zip(architecture.cost_kinds, architecture.layers, strict=True)):
        if isinstance(layer, Layer) and layer.attention and layer.attention.is_masked:  # torch computes whole squares
            work = works[name]
            works[name] = replace(work, attention=2 * work.attention, per_square=2 * work.per_square)
    units = {kind: vit_budget if chain_kind(kind) in VISION_KINDS else llm_budget for kind in works}
    frozen = adapters.frozen(frozen)
    added = adapters_works(architecture, adapters, works, t)
    modes = {kind: gradient_mode(kind, frozen, adapters.targets) for kind in works}
    layers = {
        kind: _layer_cost(kind, work, units[kind], gpu, ranks, modes[kind], added.get(kind))
        for kind, work in works.items()
    }
    of_towers: dict[str, Any] = {}
    if replica_ranks:
        whole = (
            {}
            if t == 1
            else analytic_profile(
                architecture,
                device,
                vit_budget,
                llm_budget,
                1,
                d,
                distributed_optimizer,
                frozen,
                measured,
                adapters=adapters,
            ).layers
        )
        of_towers = {
            "whole_layers": {kind: cost for kind, cost in whole.items() if chain_kind(kind) in VISION_KINDS},
            "image_tiles": float(IMAGE_PATCHES) if vision.native is not None else 0.0,
            "replica_seconds_per_byte": 1 / (_replica_rate(gpu, t, d, replica_ranks) * gpu.bandwidth_efficiency),
        }
    return Profile(
        model=architecture.name,
        model_hash=architecture.hash,
        chain=architecture.chain,
        feature_layers=vision.feature_layers,
        features_joined=bool(vision.side_by_side),
        carried_after=architecture.carried_after(t),
        layers_apart=architecture.layers_apart,
        layers=layers,
        vit_budget=vit_budget,
        llm_budget=llm_budget,
        parameters={kind: work.parameters for kind, work in works.items()},
        tensor_model_parallel_size=t,
        expert_model_parallel_size=expert_model_parallel_size,
        frozen=frozen,
        lora_rank=adapters.rank,
        lora_targets=adapters.targets,
        device=device,
        dtype="bf16",
        transfer_seconds_per_byte=1 / (gpu.network_bandwidth * gpu.bandwidth_efficiency),
        transfer_latency_seconds=2e-5,
        overhead_bytes=gpu.overhead_bytes,
        **of_towers,
        notes={
            "analytic": True,
            "matrix_efficiency": gpu.matrix_efficiency,
            "attention_efficiency": gpu.attention_efficiency,
            "bandwidth_efficiency": gpu.bandwidth_efficiency,
            "data_parallel_size": d,
            "distributed_optimizer": distributed_optimizer,
        },
    )


def _replica_rate(gpu: Device, t: int, d: int, replica_ranks: int) -> float:
    """Bytes a second of a broadcast to all ranks of a replica.

    Pipeline ranks are t d GPUs apart in Megatron's order: a node has some t of them, and each a network adapter.
    """
    in_node = min(GPUS_A_NODE, t * max(1, GPUS_A_NODE // (t * d)))
    if replica_ranks <= in_node:
        return gpu.node_bandwidth
    return min(gpu.node_bandwidth, in_node * gpu.network_bandwidth)


def _layer_cost(
    kind: str, work: Work, units: int, gpu: Device, ranks: _Ranks, mode: GradientMode, added: AdaptersWork | None
) -> LayerCost:
    forward, backward = HOST_SECONDS.get(chain_kind(kind), (0.0, 0.0))
    weights = sum(weights for weights, _ in ranks.weights(work))
    cost = _in_mode(_cost(work, units, gpu, ranks), weights, units, mode)
    if added is None:
        return _as_asked(cost, forward, backward)
    more = HOST_SECONDS_OF_ADAPTERS * added.matrices
    return _as_asked(_with_adapters(cost, added, units, gpu, ranks), forward + more, backward + more)


def _cost(work: Work, units: int, gpu: Device, ranks: _Ranks) -> LayerCost:
    t = ranks.tensor
    stream, share = work.tokens * work.width * BYTES, work.shares(t)
    matrices = 2 * work.tokens * work.matrix_weights / share / (gpu.flops * gpu.matrix_efficiency)
    attention_rate = gpu.flops * gpu.attention_efficiency * t
    bytes_a_second = gpu.memory_bandwidth * gpu.bandwidth_efficiency
    elementwise = work.passes * stream / share / bytes_a_second
    links, scores = _link_seconds(work, gpu, ranks), work.score_bytes / t / bytes_a_second
    gradients = 1 + work.input_gradient
    forward, backward = matrices + elementwise + links, gradients * matrices + 2 * elementwise + links
    attention, per_square = work.attention / attention_rate, work.per_square / attention_rate
    attention, per_square = attention + scores * work.tokens**2, per_square + scores
    return LayerCost(
        forward_seconds=forward + attention,
        backward_seconds=backward + BACKWARD_ATTENTION * attention,
        kept_bytes=work.kept / share,
        recompute_kept_bytes=stream / t,
        weight_bytes=sum(
            weights * (6 + 12 / (alike if ranks.distributed_optimizer else 1)) for weights, alike in ranks.weights(work)
        ),
        output_bytes=stream / t,
        weight_gradient_seconds=matrices if work.late else 0.0,
        late_bytes=work.late / share,
        recompute_cheap_seconds=work.cheap_passes * stream / share / bytes_a_second if work.cheap else None,
        recompute_cheap_kept_bytes=(work.kept - work.cheap) / share if work.cheap else None,
        step_seconds=sum(_step_seconds(weights, alike, gpu, ranks) for weights, alike in ranks.weights(work)),
        **exchange_costs(work, share, BYTES / (gpu.node_bandwidth * gpu.bandwidth_efficiency)),
        forward_fit=(0.0, forward / units, per_square) if per_square else None,
        backward_fit=(0.0, backward / units, BACKWARD_ATTENTION * per_square) if per_square else None,
    )


def _link_seconds(work: Work, gpu: Device, ranks: _Ranks) -> float:
    """What tensor- and expert-parallel ranks exchange, forward or backward."""
    t, e = ranks.tensor, ranks.experts
    node, network = gpu.node_bandwidth * gpu.bandwidth_efficiency, gpu.network_bandwidth * gpu.bandwidth_efficiency
    stream, routed = work.tokens * work.width * BYTES, work.tokens * work.routed * BYTES
    blocks = work.blocks - (e > 1 and routed > 0)  # dealt experts take shares of the sequence, and give them
    reductions = blocks * stream * 2 * (t - 1) / t / (node if t <= GPUS_A_NODE else network)
    near = min(e, GPUS_A_NODE)
    return reductions + 2 * routed / t * max((near - 1) / e / node, (e - near) / e / network)


def _in_mode(cost: LayerCost, weights: float, units: int, mode: GradientMode) -> LayerCost:
    """A trained layer's cost where its weights, or it and everything before it, are not trained."""
    if mode == "trained":
        return cost
    matrices = cost.weight_gradient_seconds or 0.0
    cost = replace(cost, weight_bytes=BYTES * weights, step_seconds=0.0, weight_gradient_seconds=0.0, late_bytes=0.0)
    if mode != "adapted":
        cost = replace(cost, recompute_cheap_seconds=None, recompute_cheap_kept_bytes=None)
    fit = cost.backward_fit
    if mode == "idle":
        cost = replace(cost, backward_seconds=0.0, backward_fit=fit and (0.0, 0.0, 0.0))
        return replace(cost, kept_bytes=0.0, recompute_kept_bytes=0.0)
    fit = fit and (0.0, fit[1] - matrices / units, fit[2])
    return replace(cost, backward_seconds=cost.backward_seconds - matrices, backward_fit=fit)


def _with_adapters(cost: LayerCost, work: AdaptersWork, units: int, gpu: Device, ranks: _Ranks) -> LayerCost:
    """A frozen layer's cost, and that of its adapters."""
    matrices = work.operations / (gpu.flops * gpu.matrix_efficiency)
    bytes_a_second = gpu.memory_bandwidth * gpu.bandwidth_efficiency
    forward = matrices + work.forward_bytes / bytes_a_second
    backward = 2 * matrices + work.backward_bytes / bytes_a_second
    state = 6 + 12 / (ranks.data if ranks.distributed_optimizer else 1)
    cheap, (before, behind) = cost.recompute_cheap_kept_bytes, (cost.forward_fit, cost.backward_fit)
    return replace(
        cost,
        forward_seconds=cost.forward_seconds + forward,
        backward_seconds=cost.backward_seconds + backward,
        kept_bytes=cost.kept_bytes + work.kept,
        recompute_cheap_kept_bytes=None if cheap is None else cheap + work.kept,
        weight_bytes=cost.weight_bytes + state * work.weights,
        step_seconds=_step_seconds(work.weights, ranks.data, gpu, ranks),
        forward_fit=before and (before[0], before[1] + forward / units, before[2]),
        backward_fit=behind and (behind[0], behind[1] + backward / units, behind[2]),
    )


def _as_asked(cost: LayerCost, forward: float, backward: float) -> LayerCost:
    """A layer's cost where the host takes these seconds to ask for it."""
    backward *= cost.backward_seconds > 0
    return replace(cost, host_forward_seconds=forward, host_backward_seconds=backward)


def _step_seconds(weights: float, alike: float, gpu: Device, ranks: _Ranks) -> float:
    """Gradients reduced (4 bytes), weights gathered (2), most of it hidden; the optimizer moves 40 bytes a weight.

    `alike`: ranks that have the same weights.
    """
    within = ranks.tensor * ranks.data <= GPUS_A_NODE
    bandwidth = (gpu.node_bandwidth if within else gpu.network_bandwidth) * gpu.bandwidth_efficiency
    distributed = ranks.distributed_optimizer
    carried = EXPOSED_REDUCTION * (6 if distributed else 8) * weights * (alike - 1) / alike / bandwidth
    return carried + 40 * weights / (alike if distributed else 1) / (gpu.memory_bandwidth * gpu.bandwidth_efficiency)
