"""Delayed weight gradients for zero-bubble schedules: B leaves those of the large weights to W.

    B    grad of the output -> grad of the input; (input, grad of the output) of every linear layer is kept
    W    grad of the weight = grad of the output^T x input, for all that was kept

Norms, embeddings, routers and other small weights get their gradients in B. In W autograd runs from the weight itself,
so that Megatron's hooks are called as usual. Transformer Engine's layers delay their gradients themselves
(`delay_wgrad_compute`), and call the hooks then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from torch import Tensor

from megatron.vlm import core_patches, platform
from megatron.vlm.models import transformer_engine
from megatron.vlm.models.mixture import groups
from megatron.vlm.models.region import RegionLayer


@dataclass
class Late:
    """Weight gradients of one linear layer for one microbatch, left by its backward (B) for a later action (W)."""

    held: Sequence[Tensor]
    """Input of the layer, and gradient of its output."""

    def start(self) -> None:
        """Start gathering other ranks' rows of the input, if they are needed, without waiting."""

    def accumulate(self) -> None:
        """Compute the gradients and let Megatron's hooks see them."""
        raise NotImplementedError


def accumulate(late: Sequence[Late]) -> None:
    """Compute weight gradients in order; the gather for each overlaps computing the one before."""
    for this, following in zip_longest((None, *late), late):
        if following is not None:
            following.start()
        if this is not None:
            this.accumulate()


@dataclass
class Linear(Late):
    """Weight and bias gradients of one of core's linear layers. `gather`: group over which the input's rows are
    sharded, or None; `fused`: the product is added straight to `main_grad`."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    gather: torch.distributed.ProcessGroup | None
    fused: bool = False
    _gathered: tuple[Tensor, Any] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start gathering the input's shares from all ranks, if it is sharded; do not wait."""
        if self.gather is not None:
            share = self.held[0].contiguous()
            whole = share.new_empty(self.gather.size() * len(share), *share.shape[1:])
            work = torch.distributed.all_gather_into_tensor(whole, share, group=self.gather, async_op=True)
            self._gathered = whole, work

    def accumulate(self) -> None:
        """Compute the gradients and let autograd accumulate them."""
        entering, grad_output = self.held
        if self._gathered is not None:
            entering, work = self._gathered
            work.wait()
            self._gathered = None
        grad, rows = grad_output.flatten(end_dim=-2), entering.flatten(end_dim=-2)
        torch.autograd.backward((self.weight,), (self._into_main_grad(grad, rows) if self.fused else grad.t() @ rows,))
        if self.bias is not None:
            torch.autograd.backward((self.bias,), (grad.sum(0),))

    def _into_main_grad(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Add the product to `main_grad` in one kernel; return a stand-in for the gradient that autograd expects."""
        weight: Any = self.weight
        platform.add_product(weight.main_grad, grad.t(), rows)
        return core_patches.added_already(weight)


@dataclass
class Grouped(Late):
    """Weight gradients of a layer's experts, as one product by groups of rows; `ends`: where each expert's rows end."""

    weight: torch.nn.Parameter
    ends: Tensor

    def accumulate(self) -> None:
        """Compute the gradient and let autograd accumulate it."""
        rows, grad = self.held
        torch.autograd.backward((self.weight,), (groups.weight_gradient(rows, grad, self.ends),))


@dataclass
class Delayed(Late):
    """Weight gradients of a Transformer Engine layer, which gathers its input in B and keeps a queue of its own."""

    layer: Any

    def accumulate(self) -> None:
        """Let the layer compute the oldest in its queue."""
        transformer_engine.compute_late(self.layer)


class WeightGradients:
    """A patch by which linear layers given to `attach` leave their weight gradients to a later action (W)."""

    def __init__(self) -> None:
        self._late: list[Late] | None = None
        self._attached: WeakSet[torch.nn.Module] = WeakSet()

    def attach(self, module: torch.nn.Module) -> None:
        """Make the linear layers in `module` delay their weight gradients inside `delaying`."""
        for linear in module.modules():
            if linear in self._attached:
                continue
            if isinstance(linear, RegionLayer) and any(weight.requires_grad for weight in linear.parameters()):
                linear.region = None  # gradients of a region's weights are not apart
            elif isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
                self._attached.add(linear)
                # The one method in which core's linear layers multiply; it says how, with keywords.
                linear._forward_impl = partial(self._multiply, linear._forward_impl)
            elif isinstance(linear, groups.GroupedLinear):
                self._attached.add(linear)
                linear.multiply = self._multiply_groups
            elif transformer_engine.delays(linear):
                self._attached.add(linear)
                transformer_engine.when_put_off(linear, lambda layer, held: self.keep(Delayed(held, layer)))

    @contextmanager
    def delaying(self, late: list[Late]) -> Iterator[None]:
        """Make a context in which the backward appends the weight gradients that it delays to `late`."""
        self._late = late
        try:
            yield
        finally:
            self._late = None

    def keep(self, late: Late) -> None:
        """Keep weight gradients for W, or compute them now outside of `delaying`; called by a layer's backward."""
        if self._late is None:
            accumulate([late])
        else:
            self._late.append(late)

    def _multiply(
        self, original: Callable[..., Tensor], input: Tensor, weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None, **how: Any,
    ) -> Tensor:  # fmt: skip
        """Multiply as a linear layer's `original` method does; in the backward the weight's gradient goes to `keep`."""
        if not (torch.is_grad_enabled() and weight.requires_grad and input.requires_grad):
            return original(input=input, weight=weight, bias=bias, **how)
        group = how["tp_group"] if how["sequence_parallel"] else None
        fused = how["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
        names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group")
        fixed = {"grad_output_buffer": None, "wgrad_deferral_limit": None}
        # Detached: autograd must not call at the weight before its gradient is there.
        parameters = (weight.detach(), None if bias is None else bias.detach())
        out = linear_with_frozen_weight(input, *parameters, **{name: how[name] for name in names}, **fixed)
        return self._watched(out, input, lambda *held: Linear(held, weight, bias, group, fused))

    def _multiply_groups(self, rows: Tensor, weight: torch.nn.Parameter, ends: Tensor) -> Tensor:
        """Multiply as `groups.multiply` does; in the backward the weight's gradient goes to `keep`."""
        if not (torch.is_grad_enabled() and weight.requires_grad and rows.requires_grad):
            return groups.multiply(rows, weight, ends)
        out = groups.multiply(rows, weight.detach(), ends)
        return self._watched(out, rows, lambda *held: Grouped(held, weight, ends))

    def _watched(self, out: Tensor, entering: Tensor, late: Callable[[Tensor, Tensor], Late]) -> Tensor:
        watched: Tensor = _Watch.apply(out, entering.detach(), lambda *held: self.keep(late(*held)))
        return watched


class _Watch(torch.autograd.Function):
    """An identity of `out` whose backward also hands `entering` and the gradient to `keep`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, entering: Tensor, keep: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(entering)
        ctx.keep = keep
        ctx.mark_dirty(out)  # not a view: what follows may change it in place
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.keep(*ctx.saved_tensors, grad_output)
        return grad_output, None, None
