"""Profiles without a device: operation counts divided by published peaks times the efficiencies stated here.

A measured profile has the same fields. Operations and bytes of layers are counted in `works.layer_works`. On one of t
tensor-parallel ranks:

    attention   backward takes 2.5 times the operations of forward (FlashAttention-2, arXiv 2307.08691)
    links       two all-reduces of n h 2 bytes forward, two backward; each moves 2 (t - 1) / t times its bytes
                (Megatron-LM, arXiv 2104.04473)
    experts     distributed over e of the t d ranks that hold a layer. If all are chosen equally often, (e - 1) / e of
                their inputs and outputs go to other ranks; transfers within and between nodes overlap
    weights     2 bytes a weight, 4 its gradient, 12 its optimizer state, or fewer (`states.WeightBytes`). The
                distributed optimizer shards the state over d data-parallel ranks. With e > 1 a rank has 1 / e of the
                experts, their state over t d / e ranks
    frozen      no gradients of weights: without their products, bytes and optimizer step. Bytes kept are those of a
                trained layer, an upper bound. Linear layers keep no inputs, so cheap recomputation would save nothing.
                Idle layers have no backward and keep nothing.
    adapted     as frozen, plus A and B of every adapted matrix (`adapters`). The matrix's input and A's output are
                kept, but not what only weights without adapters need. Elementwise traffic: forward reads the matrix's
                input and reads and writes its output once; backward reads the output's gradient twice and passes over
                the input's 5 times
    teams       ranks that run a pack together share a node, and exchange tokens over its links
    host        launching a layer takes `HOST_SECONDS` on every device
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.expert_ranks import check_expert_ranks, expert_shares
from omnibal_ext.chain import TOWER_KINDS, GradientMode, chain_kind, size_of
from omnibal_ext.costs.profile import LayerCost, Profile
from omnibal_ext.costs.states import WeightBytes
from omnibal_ext.costs.works import AdaptersWork, adapters_works, layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.language.layer import Layer
from omnibal_ext.modalities.modality import ENCODED, LANGUAGE, Budgets
from omnibal_ext.modalities.vision.works import IMAGE_PATCHES
from omnibal_ext.modalities.work import BYTES, Work, exchange_costs
from omnibal_ext.units import GIB

GPUS_A_NODE = 8
OVERHEAD_BYTES = 4.0 * GIB
"""Memory that an empty job takes on a GPU: driver context, communication buffers, fragmentation."""
EXPOSED_REDUCTION = 0.25
"""Fraction of gradient reduction and weight gathering that is not overlapped (--overlap-grad-reduce)."""
STEP_BYTES = 40
"""Bytes that an optimizer step reads and writes for a weight."""
HOST_SECONDS = {LANGUAGE.kinds[1]: (1e-3, 8e-4), **dict.fromkeys((one.kinds[1] for one in ENCODED), (7e-4, 6e-4))}
"""Host seconds to launch a layer's (forward, backward): benchmarks/host.py, on one core of a shared server."""
HOST_SECONDS_OF_ADAPTERS = 1.6e-4
"""Host seconds to launch the adapter of one matrix, forward or backward: nine launches in all, at a layer's rate."""
BACKWARD_ATTENTION = 2.5
"""Ratio of attention's backward to forward operations (FlashAttention-2)."""


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Parallel sizes that divide a layer's weights, and what the optimizer keeps of each."""

    tensor: int
    data: int
    experts: int
    """Expert-parallel size; 1: tensor parallelism shards every expert."""
    distributed_optimizer: bool
    states: WeightBytes

    def bytes_of(self, weights: float, alike: float) -> float:
        """Return the bytes that so many trained weights take on a rank; `alike` ranks hold the same ones."""
        return weights * self.states.on_a_rank(alike if self.distributed_optimizer else 1)

    def weights(self, work: Work) -> tuple[tuple[float, float], ...]:
        """Return (weights on a rank, number of ranks with the same ones), of all but the experts and of the experts."""
        others, experts = work.parameters - work.expert_parameters, work.expert_parameters
        shares, alike = expert_shares(self.tensor, self.data, self.experts)
        return (others / work.shares(self.tensor), self.data), (experts / shares, alike)


@dataclass(frozen=True, slots=True)
class Device:
    """Published peaks of one GPU, and the fraction of each that large bf16 layers reach."""

    name: str
    flops: float
    """Dense bf16 operations a second (vendor's data sheet)."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes a second (data sheet)."""
    node_bandwidth: float
    """Bytes a second in one direction within a node (data sheet: half of the bidirectional figure)."""
    network_bandwidth: float
    """Bytes a second per GPU between nodes: one 200 or 400 Gb/s adapter each, as in the vendor's reference systems."""
    matrix_efficiency: float
    attention_efficiency: float
    bandwidth_efficiency: float = 0.8
    overhead_bytes: float = OVERHEAD_BYTES
    attention_kernels: Mapping[str, float] = field(default_factory=dict)
    """The fraction of `flops` that attention reaches, by kernel; for one that is not here `attention_efficiency`."""
    float8: float = 1.0
    """Peak in float8 over that in bf16 (data sheet)."""

    def attending(self, kernel: str) -> "Device":
        """Return the device with its `attention_efficiency` set to that of `kernel`, if it is known."""
        return replace(self, attention_efficiency=self.attention_kernels.get(kernel, self.attention_efficiency))


HOPPER = {"flash_attention_4": 0.46, "transformer_engine": 0.49, "flash_attention": 0.23, "variable_length": 0.23,
          "cudnn": 0.38}  # fmt: skip
"""Attention's forward on an H100 over 989 TFLOP/s. FlashAttention-4 460 TFLOP/s, FlashAttention-2, which torch's own
variable-length attention is, 225: 2,048 tokens, 32 heads of 128 in 4 groups (github.com/mlc-ai/pith-train, pull request
2; backward is said to gain as much). cuDNN 484: causal, 2,048 tokens, heads of 128, which Transformer Engine calls; 373
without a mask, 1,024 tokens, heads of 64, as a ViT's tiles have them (arXiv 2407.08608, figure 5)."""
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 80e9, 2.039e12, 300e9, 25e9, 0.70, 0.50),
        Device("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, 0.60, 0.45, attention_kernels=HOPPER, float8=2.0),
        Device("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 0.60, 0.45, attention_kernels=HOPPER, float8=2.0),
    )
}


def analytic_profile(
    architecture: Architecture,
    device: str,
    budgets: Budgets,
    tensor_model_parallel_size: int = 1,
    data_parallel_size: int = 1,
    distributed_optimizer: bool = True,
    frozen: tuple[str, ...] = (),
    measured: Device | None = None,
    expert_model_parallel_size: int = 1,
    adapters: Adapters = NO_ADAPTERS,
    replica_ranks: int = 0,
    attention: str = "",
    states: WeightBytes = WeightBytes(),  # noqa: B008 (a value)
) -> Profile:
    """Return the profile of a model on a100, h100 or h200 for packs of these `budgets` (by default 1 of each size).

    `measured` (`measured_device`) replaces the efficiencies stated here. Seconds at the budgets are those of a pack of
    one sample; the fits price others. `replica_ranks` (pipeline x tensor-parallel) above 0 adds the costs of a
    replicated tower. `attention`: the kernel that attends over packs of words, and over images at their own size, a key
    of `Device.attention_kernels`. Raises UserError for unknown devices, sizes below 1, and experts that these ranks
    cannot divide.
    """
    if device not in DEVICES:
        raise UserError(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}, or measure a profile")
    sizes = (
        *budgets.values(),
        tensor_model_parallel_size,
        data_parallel_size,
        expert_model_parallel_size,
    )
    if min(sizes) < 1:
        raise UserError(f"budgets and parallel sizes must be at least 1, got {', '.join(map(str, sizes))}")
    check_expert_ranks(architecture, expert_model_parallel_size, (tensor_model_parallel_size, data_parallel_size))
    gpu, t, d = measured or DEVICES[device], tensor_model_parallel_size, data_parallel_size
    over_packs = gpu.attending(attention)
    ranks = _Ranks(t, d, expert_model_parallel_size, distributed_optimizer, states)
    budgets = architecture.profiled(budgets)
    works = layer_works(architecture, budgets, t, expert_model_parallel_size)
    of_packs = "vit" if architecture.vision.native else None
    devices = {kind: over_packs if chain_kind(kind) == of_packs else gpu for kind in works}
    for name, layer in dict.fromkeys(zip(architecture.cost_kinds, architecture.layers, strict=True)):
        if isinstance(layer, Layer) and layer.attention:
            devices[name] = over_packs
            if layer.attention.is_masked:  # torch computes all scores
                work, devices[name] = works[name], gpu
                works[name] = replace(work, attention=2 * work.attention, per_square=2 * work.per_square)
    units = {kind: budgets[size_of(kind)] for kind in works}
    trained = adapters.trained(frozen)
    added = adapters_works(architecture, adapters, works, t)
    layers = {
        kind: _layer_cost(kind, work, units[kind], devices[kind], ranks, trained.mode(kind), added.get(kind))
        for kind, work in works.items()
    }
    gains = float8_gains(layers, gpu.float8) if architecture.language.takes_float8 else {}
    of_towers: dict[str, Any] = {}
    if replica_ranks:
        whole: Mapping[str, LayerCost] = {}
        if t > 1:
            unsharded = (1, d, distributed_optimizer, trained.frozen, measured)
            how: dict[str, Any] = {"adapters": adapters, "attention": attention, "states": states}
            whole = analytic_profile(architecture, device, budgets, *unsharded, **how).layers
        of_towers = {
            "whole_layers": {kind: cost for kind, cost in whole.items() if chain_kind(kind) in TOWER_KINDS},
            "image_tiles": float(IMAGE_PATCHES) if architecture.vision.native else 0.0,
            "replica_seconds_per_byte": 1 / (_replica_rate(gpu, t, d, replica_ranks) * gpu.bandwidth_efficiency),
        }
    return Profile(
        model=architecture.name,
        model_hash=architecture.hash,
        chain=architecture.chain,
        feature_layers=architecture.vision.feature_layers,
        features_joined=bool(architecture.vision.side_by_side),
        carried_after=architecture.carried_after(t),
        layers_apart=architecture.layers_apart,
        layers=layers,
        budgets=budgets,
        parameters={kind: work.parameters for kind, work in works.items()},
        tensor_model_parallel_size=t,
        expert_model_parallel_size=expert_model_parallel_size,
        trained=trained,
        device=device,
        dtype="bf16",
        transfer_seconds_per_byte=1 / (gpu.network_bandwidth * gpu.bandwidth_efficiency),
        transfer_latency_seconds=2e-5,
        overhead_bytes=gpu.overhead_bytes,
        **of_towers,
        notes={
            "analytic": True,
            "matrix_efficiency": gpu.matrix_efficiency,
            "attention_efficiency": over_packs.attention_efficiency,
            "bandwidth_efficiency": gpu.bandwidth_efficiency,
            "data_parallel_size": d,
            "distributed_optimizer": distributed_optimizer,
            **({"float8": gains} if gains else {}),
            **({} if states == WeightBytes() else {"bytes_a_weight": states.on_a_rank()}),
        },
    )


def float8_gains(layers: Mapping[str, LayerCost], peak: float) -> dict[str, dict[str, float]]:
    """Return {kind: {words: gain}}, an upper bound of how many times faster each kind of language layer is in float8
    than in bf16: its three products `peak` times as fast, casting free."""
    found = {}
    for kind, cost in layers.items():
        seconds, matrices = cost.forward_seconds + cost.backward_seconds, cost.weight_gradient_seconds
        if peak > 1 and matrices and chain_kind(kind) == LANGUAGE.kinds[1]:
            found[kind] = {"layer, at most": seconds / (seconds - 3 * matrices * (1 - 1 / peak))}
    return found


def _replica_rate(gpu: Device, t: int, d: int, replica_ranks: int) -> float:
    """Return bytes a second of a broadcast to all ranks of a replica, each with a network adapter.

    Neighbouring pipeline ranks are t d GPUs apart in Megatron's order, so a node may hold few of the replica's ranks.
    """
    in_node = min(GPUS_A_NODE, t * max(1, GPUS_A_NODE // (t * d)))
    if replica_ranks <= in_node:
        return gpu.node_bandwidth
    return min(gpu.node_bandwidth, in_node * gpu.network_bandwidth)


def _layer_cost(
    kind: str, work: Work, units: int, gpu: Device, ranks: _Ranks, mode: GradientMode, added: AdaptersWork | None
) -> LayerCost:
    """Return the cost of a kind of layer in a gradient mode, with the work `added` by adapters, and host seconds."""
    weights = sum(weights for weights, _ in ranks.weights(work))
    cost = _in_mode(_cost(work, units, gpu, ranks), weights, units, mode)
    if added is not None:
        cost = _with_adapters(cost, added, units, gpu, ranks)
    more = HOST_SECONDS_OF_ADAPTERS * added.matrices if added else 0.0
    forward, backward = (seconds + more for seconds in HOST_SECONDS.get(chain_kind(kind), (0.0, 0.0)))
    backward *= cost.backward_seconds > 0
    return replace(cost, host_forward_seconds=forward, host_backward_seconds=backward)


def _cost(work: Work, units: int, gpu: Device, ranks: _Ranks) -> LayerCost:
    """Return the cost of a trained layer by its work on a pack of `units`, without adapters and host seconds."""
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
        weight_bytes=sum(ranks.bytes_of(*weights) for weights in ranks.weights(work)),
        output_bytes=stream / (1 if work.whole_output else t),
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
    """Return seconds of communication between tensor- and expert-parallel ranks, forward or backward."""
    t, e = ranks.tensor, ranks.experts
    node, network = gpu.node_bandwidth * gpu.bandwidth_efficiency, gpu.network_bandwidth * gpu.bandwidth_efficiency
    stream, routed = work.tokens * work.width * BYTES, work.tokens * work.routed * BYTES
    blocks = work.blocks - (e > 1 and routed > 0)  # expert parallelism works on shards of the sequence
    reductions = blocks * stream * 2 * (t - 1) / t / (node if t <= GPUS_A_NODE else network)
    near = min(e, GPUS_A_NODE)
    return reductions + 2 * routed / t * max((near - 1) / e / node, (e - near) / e / network)


def _in_mode(cost: LayerCost, weights: float, units: int, mode: GradientMode) -> LayerCost:
    """Return the cost in gradient mode `mode`, given that of the trained layer and its number of weights on a rank."""
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
    """Return a frozen layer's cost with that of its adapters added."""
    matrices = work.operations / (gpu.flops * gpu.matrix_efficiency)
    bytes_a_second = gpu.memory_bandwidth * gpu.bandwidth_efficiency
    forward = matrices + work.forward_bytes / bytes_a_second
    backward = 2 * matrices + work.backward_bytes / bytes_a_second
    cheap, (before, behind) = cost.recompute_cheap_kept_bytes, (cost.forward_fit, cost.backward_fit)
    return replace(
        cost,
        forward_seconds=cost.forward_seconds + forward,
        backward_seconds=cost.backward_seconds + backward,
        kept_bytes=cost.kept_bytes + work.kept,
        recompute_cheap_kept_bytes=None if cheap is None else cheap + work.kept,
        weight_bytes=cost.weight_bytes + ranks.bytes_of(work.weights, ranks.data),
        step_seconds=_step_seconds(work.weights, ranks.data, gpu, ranks),
        forward_fit=before and (before[0], before[1] + forward / units, before[2]),
        backward_fit=behind and (behind[0], behind[1] + backward / units, behind[2]),
    )


def _step_seconds(weights: float, alike: float, gpu: Device, ranks: _Ranks) -> float:
    """Return seconds to reduce gradients (4 bytes a weight) and gather weights (2), mostly overlapped, and step.

    `alike`: ranks with the same weights.
    """
    within = ranks.tensor * ranks.data <= GPUS_A_NODE
    bandwidth = (gpu.node_bandwidth if within else gpu.network_bandwidth) * gpu.bandwidth_efficiency
    distributed = ranks.distributed_optimizer
    carried = EXPOSED_REDUCTION * (6 if distributed else 8) * weights * (alike - 1) / alike / bandwidth
    moved = STEP_BYTES * weights / (alike if distributed else 1)
    return carried + moved / (gpu.memory_bandwidth * gpu.bandwidth_efficiency)
