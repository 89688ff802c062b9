"""Cheap recomputation: outputs of norms and activation functions are not kept for the backward pass.

    x ── norm ── y ── linear ──        without: norm keeps x, and linear keeps y for the gradient of its weight
                                       with:    norm keeps x alone, and linear keeps from where y comes

The backward pass of the linear layer recomputes y, and the norm's backward pass uses the same y: it is computed once
more, and held only between the two. With delayed weight gradients (zero bubble) y is held from B to W, as without
recomputation. Core's `CheckpointWithoutOutput` does the same with a C++ extension, compiled on first use.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

Function = Callable[..., Tensor]


def run_recomputed(function: Function, *inputs: Any) -> Tensor:
    """Return `function(*inputs)`; only the inputs are kept, and the function may run again in the backward pass.

    It must be deterministic and have one output.
    """
    wanted = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
    out: Tensor = _Recomputed.apply(function, *inputs) if wanted else function(*inputs)
    return out


def keep_where_from(linear: torch.nn.Module) -> None:
    """Make a linear layer not keep an input that `run_recomputed` returned: its backward recomputes it."""
    multiply = linear.forward

    def forward(entering: Tensor, *others: Any, **options: Any) -> Any:
        source = entering.grad_fn
        if not isinstance(source, _Recomputed._backward_cls):
            return multiply(entering, *others, **options)
        storage = entering.untyped_storage()._cdata

        def pack(kept: Tensor) -> Any:
            return _Awaited(source, kept) if kept.untyped_storage()._cdata == storage else kept

        def unpack(kept: Any) -> Tensor:
            return kept.fill() if isinstance(kept, _Awaited) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return multiply(entering, *others, **options)

    linear.forward = forward


def recompute_cheap(layer: Any) -> None:
    """Let a transformer layer recompute the outputs of its norms and activation function instead of keeping them.

    In a layer of experts only the norm before the attention: router and sorted copies need the other's output.
    """
    pairs = [(layer.input_layernorm, layer.self_attention.linear_qkv)]
    if isinstance(layer.mlp, MLP):
        pairs.append((layer.pre_mlp_layernorm, layer.mlp.linear_fc1))
        layer.mlp.recomputes_activation = True
        keep_where_from(layer.mlp.linear_fc2)
    for norm, linear in pairs:
        norm.forward = partial(run_recomputed, norm.forward)
        keep_where_from(linear)


class _Recomputed(torch.autograd.Function):
    """A function's call without autograd's graph; its node in the outer graph calls the function again, with one."""

    _backward_cls: type

    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Any) -> Tensor:
        ctx.function, ctx.outcome = function, None
        ctx.others = [None if isinstance(one, Tensor) else one for one in inputs]
        ctx.tensors = [index for index, one in enumerate(inputs) if isinstance(one, Tensor)]
        ctx.save_for_backward(*(inputs[index] for index in ctx.tensors))
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaves, out = _outcome(ctx)
        ctx.outcome = None
        torch.autograd.backward(out, grad)
        grads: list[Tensor | None] = [None] * len(ctx.others)
        for index, leaf in zip(ctx.tensors, leaves, strict=True):
            grads[index] = leaf.grad
        return None, *grads


def _outcome(node: Any) -> tuple[list[Tensor], Tensor]:
    """Return a recomputed call's inputs, detached, and its output; computed when first asked for."""
    if node.outcome is None:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in node.saved_tensors]
        inputs = list(node.others)
        for index, leaf in zip(node.tensors, leaves, strict=True):
            inputs[index] = leaf
        with torch.enable_grad():
            node.outcome = leaves, node.function(*inputs)
    found: tuple[list[Tensor], Tensor] = node.outcome
    return found


class _Awaited:
    """A stand-in for a saved tensor that is (a view of) the output of a node, and can be recomputed."""

    def __init__(self, node: Any, tensor: Tensor) -> None:
        self.node, self.view = node, (tensor.shape, tensor.stride(), tensor.storage_offset())

    def fill(self) -> Tensor:
        """Recompute the tensor."""
        return _outcome(self.node)[1].detach().as_strided(*self.view)
