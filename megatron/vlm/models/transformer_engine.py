"""Transformer Engine: all uses of it are in this file.

It can be imported without Transformer Engine, but then not used. `tests/engine` has a stand-in for CPUs.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from torch import Tensor

from megatron.vlm.microbatch import Segments

NormAndColumns: type = TELayerNormColumnParallelLinear
"""A norm and the column-parallel projection behind it."""
Columns: type = TEColumnParallelLinear
"""A column-parallel projection."""
Rows: type = TERowParallelLinear
"""A row-parallel projection."""


def attention_over_pack(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Compute attention inside each segment: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
    return _thd_kernel(query.shape[1], key.shape[1], query.shape[2], scale)(
        query,
        key,
        value,
        cu_seqlens_q=segments.cu_seqlens_q,
        cu_seqlens_kv=segments.cu_seqlens_kv,
        max_seqlen_q=segments.max_seqlen_q,
        max_seqlen_kv=segments.max_seqlen_kv,
        attn_mask_type="padding_causal" if segments.causal else "padding",
    )


def delays(module: torch.nn.Module) -> bool:
    """Check whether a module is a Transformer Engine linear layer that delays its weight gradients to `backward_dw`."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def when_put_off(layer: Any, tell: Callable[[Any, Sequence[Tensor]], None]) -> None:
    """Have a layer call `tell(layer, tensors held)` whenever its backward has delayed weight gradients."""
    store = layer.wgrad_store
    put = store.put

    def put_and_tell(tensors: Sequence[Tensor], function: Callable[..., Any]) -> None:
        put(tensors, function)
        tell(layer, [tensor for tensor in tensors if isinstance(tensor, Tensor)])

    store.put = put_and_tell


def mark_delayed(module: torch.nn.Module) -> None:
    """Mark biases whose gradients layers delay, so that data-parallel hooks wait for `backward_dw`.

    Transformer Engine marks their weights so; core makes new biases where it initialises on the host. A bias that core
    adds behind the layer gets its gradient in the backward pass, without delay.
    """
    for layer in module.modules():
        if delays(layer) and isinstance(layer.bias, torch.nn.Parameter):
            setattr(layer.bias, "skip_backward_post_hook", not layer.te_return_bias)  # noqa: B010 (Megatron reads it)


def compute_late(layer: Any) -> None:
    """Compute the layer's oldest delayed gradients, without those of a bias that core adds after it.

    With fused accumulation the backward pass B sets a dummy gradient of the weight, which the hooks after `backward_dw`
    W remove: if several B come before a W, each W needs its own. A pack that skips the layer leaves a zero gradient of
    the bias, which would keep the layer from setting one.
    """
    from transformer_engine.pytorch.module.base import get_dummy_wgrad

    has_bias, weight = layer.use_bias, layer.weight
    if layer.fuse_wgrad_accumulation and weight.grad is None:
        weight.grad = get_dummy_wgrad(list(weight.shape), weight.dtype)
    layer.use_bias = has_bias and not layer.te_return_bias
    if layer.use_bias:
        layer.bias.grad = None
    try:
        layer.backward_dw()
    finally:
        layer.use_bias = has_bias


@cache
def _thd_kernel(heads: int, groups: int, width: int, scale: float | None) -> Callable[..., Tensor]:
    """Make the attention for packs, one for all layers of these sizes and outside of the model: it has no weights."""
    from transformer_engine.pytorch import DotProductAttention

    kernel: Callable[..., Tensor] = DotProductAttention(
        heads, width, num_gqa_groups=groups, qkv_format="thd", softmax_scale=scale
    )
    return kernel
