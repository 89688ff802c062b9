"""Zero-bubble schedules: the backward pass leaves the gradients of the large weights for later.

    B    grad of the output -> grad of the input; (input, grad of the output) of every linear layer is put aside
    W    grad of the weight = grad of the output^T x input, for all that was put aside

Norms, embeddings and other small weights get their gradients in B. A weight's gradient is handed to autograd at the
weight itself, so that Megatron's hooks see what they always see.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """One linear layer of one microbatch, as B leaves it for W. `gather`: the input is a share of the sequence."""

    entering: Tensor
    grad_output: Tensor
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    gather: torch.distributed.ProcessGroup | None

    def accumulate(self) -> None:
        """Compute the gradients and let autograd accumulate them."""
        entering = self.entering
        if self.gather is not None:
            entering = gather_from_sequence_parallel_region(entering, group=self.gather)
        grad = self.grad_output.flatten(end_dim=-2)
        torch.autograd.backward((self.weight,), (grad.t() @ entering.flatten(end_dim=-2),))
        if self.bias is not None:
            torch.autograd.backward((self.bias,), (grad.sum(0),))


class WeightGradients:
    """What the backward passes of one rank have put aside. Works on linear layers given to `attach`."""

    def __init__(self) -> None:
        self._aside: list[Linear] | None = None
        self._attached: WeakSet[torch.nn.Module] = WeakSet()

    def attach(self, module: torch.nn.Module) -> None:
        """Make the linear layers in `module` put their weight gradients aside while `put_aside` is open; once each."""
        for linear in module.modules():
            if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)) and linear not in self._attached:
                self._attached.add(linear)
                # The one method in which core's linear layers multiply; it says how, with keywords.
                linear._forward_impl = _Multiply(self, linear._forward_impl)

    @contextmanager
    def put_aside(self, linears: list[Linear]) -> Iterator[None]:
        """Append to `linears` what the backward pass inside the block leaves for later."""
        self._aside = linears
        try:
            yield
        finally:
            self._aside = None

    def keep(self, linear: Linear) -> None:
        """Called by the backward pass of a linear layer."""
        if self._aside is None:
            linear.accumulate()
        else:
            self._aside.append(linear)


class _Multiply:
    """Takes the place of a linear layer's multiplication: the same result, the weight's gradient apart."""

    def __init__(self, gradients: WeightGradients, original: Any) -> None:
        self.gradients, self.original = gradients, original

    def __call__(
        self, input: Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, **how: Any
    ) -> Tensor:
        if not (torch.is_grad_enabled() and weight.requires_grad and input.requires_grad):
            out: Tensor = self.original(input=input, weight=weight, bias=bias, **how)
            return out
        group = how["tp_group"] if how["sequence_parallel"] else None
        names = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group")
        fixed = {"grad_output_buffer": None, "wgrad_deferral_limit": None}
        # Detached: autograd must not call at the weight before its gradient is there.
        parameters = (weight.detach(), None if bias is None else bias.detach())
        out = linear_with_frozen_weight(input, *parameters, **{name: how[name] for name in names}, **fixed)

        def keep(entering: Tensor, grad_output: Tensor) -> None:
            self.gradients.keep(Linear(entering, grad_output, weight, bias, group))

        watched: Tensor = _Watch.apply(out, input.detach(), keep)
        return watched


class _Watch(torch.autograd.Function):
    """The identity, whose backward pass keeps the gradient that comes by."""

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
