"""Fixes of megatron-core 0.19, so that it starts from pip's wheel, and trains and resumes without Apex, no slower."""

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch

from megatron.vlm import optional, platform


def install() -> None:
    """Install all fixes of this module in megatron-core; each has its effect once a process."""
    patch_start()
    patch_groups_of_one()
    patch_weight_gradients()
    patch_adam()
    patch_distributed_optimizer()
    patch_padding()
    patch_gradient_norm()
    patch_momentum()


@cache
def patch_start() -> None:
    """Let Megatron start from pip's wheel.

    Its first rank runs `make` for functions in C++ and ends the process where that fails: the wheel has what is made,
    and no file to make it by.
    """
    if optional.installed("megatron.core.datasets.helpers_cpp"):
        from megatron.core.datasets import utils

        utils.compile_helpers = lambda *_, **__: None


@cache
def patch_groups_of_one() -> None:
    """Let tensor parallelism of one rank leave nothing in autograd's graph, and cost the host nothing.

    Core enters every exchange there, an identity forward and backward; warns in each linear layer that it looks its
    group up; and enters autocast, in which nothing is computed here, for each of their gradients.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, mappings

    for cls in (mappings._CopyToModelParallelRegion, mappings._ReduceFromModelParallelRegion):
        cls.apply = staticmethod(_between_ranks(cls.apply))
    for cls in (layers.LinearWithGradAccumulationAndAsyncCommunication, layers.LinearWithFrozenWeight):
        cls.forward, cls.backward = staticmethod(unwrap(cls.forward)), staticmethod(unwrap(cls.backward))
    look_up = mappings.get_tensor_model_parallel_group_if_none

    def find(group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
        if group is None and not is_expert and parallel_state.is_initialized():
            return parallel_state.get_tensor_model_parallel_group(check_initialized)
        return look_up(group, is_expert, check_initialized) if group is None else group

    layers.get_tensor_model_parallel_group_if_none = mappings.get_tensor_model_parallel_group_if_none = find


def _between_ranks(exchange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Exchange a tensor in a group, or return it, if that is one rank."""

    def exchanged(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return tensor if group is not None and group.size() == 1 else exchange(tensor, group)

    return exchanged


@cache
def patch_weight_gradients() -> None:
    """Let core's linear layers add to `main_grad` in the product itself, which core leaves to a module of Apex's.

    They mark the weight that autograd kept for them, so that nobody adds again. Where hooks watch what is kept
    (`models/recompute.py`) that is another tensor, and the weight has no gradient: mark it, and give what nobody reads.
    """
    from megatron.core.tensor_parallel import layers

    def accumulate(rows: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        platform.add_product(total, grad.t(), rows)

    if not layers._grad_accum_fusion_available:
        names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(**dict.fromkeys(names, accumulate))
        layers._grad_accum_fusion_available = True
    cls = layers.LinearWithGradAccumulationAndAsyncCommunication
    original_forward, original_backward = cls.forward, cls.backward

    def forward(ctx: Any, entering: torch.Tensor, weight: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.weight = weight
        out: torch.Tensor = original_forward(ctx, entering, weight, *how)
        return out

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        entering, found, *more = original_backward(ctx, grad)
        if ctx.main_grad is not None and found is None:
            found = added_already(ctx.weight)
        return entering, found, *more

    cls.forward, cls.backward = staticmethod(forward), staticmethod(backward)


def added_already(weight: Any, unread: Callable[..., torch.Tensor] = torch.empty_like) -> torch.Tensor:
    """Mark a weight whose gradient is in `main_grad`; return a stand-in for autograd, `unread` by all or zero."""
    weight.grad_added_to_main_grad = True
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else unread)(weight)


@cache
def patch_adam() -> None:
    """Let torch's Adam step in one kernel on a GPU, and clip there.

    Core takes torch's choice, which reads and writes moments and weights once an operation, and multiplies every
    gradient before. Saves say how they were stepped: this machine decides for itself, and torch puts the counts of
    steps, which that kernel reads, where it wants them.
    """
    from megatron.core.optimizer import optimizer as optimizers

    cls, original_clip = optimizers.MegatronOptimizer, optimizers.clip_grad_by_total_norm_fp32
    original_init, fused = cls.__init__, WeakSet[Any]()

    def choose(_: Any, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["fused"] = platform.HAS_CUDA or None  # None: torch chooses

    def init(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> None:
        original_init(self, optimizer, *arguments, **named)
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            choose(optimizer, {"param_groups": optimizer.param_groups})
            optimizer.register_load_state_dict_pre_hook(choose)
            if platform.HAS_CUDA:
                fused.add(optimizer)

    def clip(weights: list[torch.Tensor], max_norm: float, total_norm: Any, *more: Any, **named: Any) -> None:
        for adam in fused:
            own = [weight for group in adam.param_groups for weight in group["params"]]
            if len(own) == len(weights) and own[0] is weights[0]:
                over = (total_norm + 1e-6) / max_norm
                adam.grad_scale = torch.full((), over, device="cuda") if over > 1 else None
                return
        original_clip(weights, max_norm, total_norm, *more, **named)

    cls.__init__, optimizers.clip_grad_by_total_norm_fp32 = init, clip


@cache
def patch_gradient_norm() -> None:
    """Let the norm of the gradients stay on the device without Apex or Transformer Engine.

    Core's own way brings the norm of each gradient to the host, which waits for every one.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    def l2_norm(_: int, __: Any, lists: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
        return torch.nn.utils.get_total_norm(lists[0]).view(1), None

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


def _count_steps() -> None:
    """Let a run be saved, and go on, in which a rank trains nothing, its part being frozen.

    The first rank saves Adam's step for all, as the state of its weights has it. Where it has none, core saves no step,
    without which no other rank goes on, and the distributed optimizer stops at an assertion: count steps on each rank,
    on the host.
    """
    from megatron.core.optimizer import optimizer as optimizers

    cls = optimizers.MegatronOptimizer
    original_init, give_step = cls.__init__, cls._restore_common_per_param_step

    def init(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> None:
        original_init(self, optimizer, *arguments, **named)
        self.steps = torch.zeros(())
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            optimizer.register_step_post_hook(lambda *_: self.steps.add_(1))

    def extract_step(self: Any, _: dict[str, Any]) -> Any:
        return self.steps.clone()

    def restore_step(self: Any, state: dict[str, Any], step: Any) -> None:
        give_step(state, step)
        self.steps = torch.as_tensor(step).clone()

    cls.__init__, cls._extract_common_per_param_step = init, extract_step
    cls._restore_common_per_param_step = restore_step


@cache
def patch_distributed_optimizer() -> None:
    """Let the distributed optimizer resume without Apex or Transformer Engine.

    1. Loading asks a fresh optimizer for its state, and torch's Adam has none before its first step: Megatron stops at
       an assertion. Give it the state it starts from, step 0 and moments of zero.
    2. What is loaded is copied into shards that, in fp32, are views of trained weights: record no gradient then.
    3. All weights are handed one and the same step counter, which would count once a weight, and it is overwritten by
       the fresh one, or looked for in vain (`--dist-ckpt-optim-fully-reshardable`): leave it out there, and give each
       weight its own, at the checkpoint's step.
    4. A rank may have nothing to train: `_count_steps`.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    _count_steps()
    cls = distrib_optimizer.DistributedOptimizer
    original_state_dict, original_load_state_dict = cls.state_dict, cls.load_state_dict
    original_set_states = cls._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> dict[str, Any]:
        if not self.optimizer.state:
            for parameter in (weight for group in self.optimizer.param_groups for weight in group["params"]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros((), device="cuda"), **moments}
        if nothing_trains := not self.optimizer.state:
            self.optimizer.state["no weight"] = {"step": self.steps}
        state: dict[str, Any] = original_state_dict(self)
        if nothing_trains:
            del self.optimizer.state["no weight"]
        return state

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        original_load_state_dict(self, state)
        step = float(state["optimizer"]["param_groups"][0]["step"])
        self.steps = torch.tensor(step)
        for values in self.optimizer.state.values():
            values["step"] = torch.full((), step, device="cuda")

    @torch.no_grad()
    def set_states(self: Any, weight: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        original_set_states(self, weight, {**tensors, "step": None})

    cls.state_dict, cls.load_state_dict = state_dict, load_state_dict
    cls._set_main_param_and_optimizer_states = set_states


@cache
def patch_padding() -> None:
    """Save zeros where a buffer of the distributed optimizer has gaps between weights.

    Core saves what was in memory there: no two saves would be equal, and it may be anything.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_param_state_dp_reshardable

    def sharded_state(self: Any, *arguments: Any, **named: Any) -> dict[Any, Any]:
        state: dict[Any, Any] = original(self, *arguments, **named)
        for buffer in range(len(self.gbuf_ranges)):
            for part in (part for buckets in state[buffer].values() for bucket in buckets for part in bucket):
                for shard in part.values() if part["padding"].unwrap() else ():
                    if isinstance(shard, ShardedTensor):
                        shard.data.zero_()
        return state

    DistributedOptimizer.sharded_param_state_dp_reshardable = sharded_state


@cache
def patch_momentum() -> None:
    """Let SGD resume: loading wants the state that an optimizer starts from, and core makes none.

    A momentum of zeros becomes the first gradient, as does none.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    original = MegatronOptimizer.__init__

    def start(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"] if group.get("momentum") else ():
                optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))

    def init(self: Any, optimizer: torch.optim.Optimizer, config: Any, init_state_fn: Any = None) -> None:
        original(self, optimizer, config, init_state_fn or start)

    MegatronOptimizer.__init__ = init
