"""Attention within samples, images or tiles of a pack: the `core_attention` of all layers.

| where | tokens of a pack | images at their own size | tiles of a batch |
|---|---|---|---|
| FlashAttention-4, on Hopper and Blackwell | its kernels, one call a pack | the same | torch, one call |
| Transformer Engine is installed | its THD kernels, one call a pack | as below | torch, one call |
| flash-attn is | flash-attn, one call a pack | the same | torch, one call |
| CUDA | torch's variable-length flash attention, one call a pack | the same | torch, one call |
| elsewhere, in fp32, or with dropout | torch, sample by sample | torch, one by one | torch, one call |

Transformer Engine's kernel comes last where it is at a loss: cuDNN trains heads of up to 128 numbers alone (Gemma 3 has
256), and launches blocks for as many rows as a pack has for each segment, most of them empty where these are windows.

Where a sample of a pack has a mask of its own (a window, images seen in both directions: Gemma 3), torch computes that
pack sample by sample, as no kernel for packs takes such masks; where scores are capped (PaliGemma 2), every pack.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.utils import print_rank_0
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron.vlm import platform
from megatron.vlm.microbatch import HeadExchange, Segments
from megatron.vlm.models import transformer_engine
from megatron.vlm.models.attention.rotation import turned
from megatron.vlm.models.exchange import heads_to_rows, rows_to_heads
from megatron.vlm.models.tile_rows import FillUp
from omnibal_ext.output import printable

Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]
"""Attention over a pack: query [T, heads, d], key and value [T, groups, d], boundaries, scale -> [T, heads * d]."""


class IsolatedAttention(MegatronModule):
    """Softmax attention inside each segment of a pack: causal inside samples, bidirectional inside images.

    Shapes as core's: query [T, 1, heads, d], key and value [T, 1, groups, d] -> [T, 1, heads * d]. Cost: sum of len^2.
    """

    sees_images = False
    """Whether segments are images or windows of them, and not samples."""
    tokens = 1

    def __init__(self, config: TransformerConfig, cap: float | None = None, **_: Any) -> None:
        """Choose the kernel for this configuration; with `cap`, scores x become cap tanh(x / cap)."""
        super().__init__(config)
        self.cap = cap
        name = "sample_by_sample" if cap else choose_kernel(config, self.sees_images)
        _say(name)
        self.kernel = KERNELS.get(name)
        self.is_one_operation = name == "variable_length"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Segments | None = None,
        **_: Any,
    ) -> Tensor:
        """Map query [T, 1, heads, d], key, value [T, 1, groups, d] to [T, 1, heads * d]; rotates first if told to."""
        assert packed_seq_params is not None
        if packed_seq_params.rotation is not None:
            query, key = turned(query, key, *packed_seq_params.rotation)
            # As a part of what was projected it would keep query and key, as they were, for backward.
            value = value.contiguous()
        query, key, value, segments = query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params
        if segments.exchange is None:
            return self._inside(query, key, value, segments).unsqueeze(1)
        cut = segments.exchange.rows[segments.exchange.team_rank]
        parts = self._of_parts(query[:cut], key[:cut], value[:cut], segments.exchange)
        whole = self._inside(query[cut:], key[cut:], value[cut:], segments) if segments.lengths else parts[:0]
        return torch.cat([parts, whole]).unsqueeze(1)

    def _of_parts(self, query: Tensor, key: Tensor, value: Tensor, exchange: HeadExchange) -> Tensor:
        """Compute attention of samples split over ranks: each rank computes some heads of all their rows."""
        heads, width = query.shape[1:]
        query, key, value = rows_to_heads(query, key, value, exchange)
        out = self._inside(query, key, value, exchange.segments) if query.shape[1] else query.flatten(1)
        return heads_to_rows(out.unflatten(1, (-1, width)) if out.numel() else query, heads, exchange).flatten(1)

    def _inside(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Map query, key, value [rows, heads or groups, d] of whole samples to [rows, heads * d]."""
        if self.kernel is None or segments.masks:
            return self._sample_by_sample(query, key, value, segments)
        return self.kernel(query, key, value, segments, self.config.softmax_scale)

    def _sample_by_sample(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        splits = (tensor.unsqueeze(0).split(segments.lengths, dim=1) for tensor in (query, key, value))
        masks = segments.masks or (None,) * len(segments.lengths)
        samples = zip(*splits, masks, strict=True)
        out = [by_torch(self, segments.causal, q, k, v, mask, self.cap) for q, k, v, mask in samples]
        return torch.cat(out, dim=1).squeeze(0)


class ImageAttention(IsolatedAttention):
    """Attention inside images at native resolution, or inside windows of them."""

    sees_images = True


class TileAttention(MegatronModule):
    """Softmax attention inside each tile of `tokens` ViT tokens, bidirectional.

    query, key, value [tokens * tiles, 1, heads, d], token by token -> [rows, 1, heads * d], where under sequence
    parallelism rows of zeros fill up until the tensor-parallel group divides them.
    """

    is_one_operation = True
    """Whether it is one of torch's, which its compiler knows (`models/region.py`)."""

    def __init__(self, config: TransformerConfig, tokens: int, **_: Any) -> None:
        super().__init__(config)
        self.tokens = tokens

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Map query, key, value [tokens * tiles, 1, heads, d] to [rows, 1, heads * d]."""
        tiles = query.shape[0] // self.tokens  # `len` is a number where a region is traced
        by_tile = (t.unflatten(0, (self.tokens, tiles)).squeeze(2).transpose(0, 1) for t in (query, key, value))
        out = by_torch(self, False, *by_tile).transpose(0, 1).flatten(0, 1).unsqueeze(1)
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        filled: Tensor = FillUp.apply(out, len(out) + -len(out) % ranks) if ranks > 1 and len(out) % ranks else out
        return filled


def by_torch(
    module: MegatronModule, causal: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Run torch's attention on sequences of one length: query [b, s, heads, d] -> [b, s, heads * d].

    Scores x become cap tanh(x / cap), then `mask` [s, s], which replaces `causal`, is added. Dropout: the module's.
    """
    if mask is not None or cap:  # no kernel of torch's takes both a mask and groups of heads, but the slowest
        key, value = (tensor.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for tensor in (key, value))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    dropout = module.config.attention_dropout if module.training else 0.0
    # Heads differ between ranks, so do their masks; under sequence parallelism the whole layer draws so already.
    own = dropout and not module.config.sequence_parallel
    with tensor_parallel.get_cuda_rng_tracker().fork() if own else nullcontext():
        if cap:  # computed again for the backward pass: scores are more than all that a layer keeps
            how = (mask, causal, module.config.softmax_scale, cap, dropout)
            out = checkpoint(_capped, q, k, v, *how, use_reentrant=False, preserve_rng_state=dropout > 0)
        else:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if mask is None else mask.to(q.dtype),
                dropout_p=dropout,
                is_causal=causal and mask is None,
                scale=module.config.softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
    return out.transpose(1, 2).flatten(2)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, cap: float,
    drop: float,
) -> Tensor:  # fmt: skip
    """Compute attention with capped scores, which no kernel of torch's has; all tensors are [b, heads, s, d]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = cap * torch.tanh((query @ key.transpose(-2, -1)).float() * (scale / cap))
    if mask is not None:
        scores = scores + mask
    elif causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return torch.dropout(scores.softmax(dim=-1).to(value.dtype), drop, True) @ value


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return _packed(flash_attn_varlen_func, query, key, value, segments, scale)


def _flash_attention_4(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    return _packed(flash_attn_varlen_func, query, key, value, segments, scale)


def _packed(
    function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None
) -> Tensor:
    """Call one of flash-attn's functions on a pack; arguments but query, key and value by name."""
    out = function(
        query,
        key,
        value,
        cu_seqlens_q=segments.cu_seqlens_q,
        cu_seqlens_k=segments.cu_seqlens_kv,
        max_seqlen_q=segments.max_seqlen_q,
        max_seqlen_k=segments.max_seqlen_kv,
        softmax_scale=scale,
        causal=segments.causal,
    )
    rows: Tensor = out[0] if isinstance(out, tuple) else out  # version 4 returns the log-sum-exp too
    return rows.flatten(1)


def _variable_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    taken, grouped = _parameters(varlen_attn), query.shape[1] != key.shape[1]
    # torch 2.10 has a switch for causal attention, later ones a window; groups of heads are known from 2.12 on.
    how: dict[str, Any] = {"is_causal": segments.causal}
    if "window_size" in taken:
        how = {"window_size": (-1, 0 if segments.causal else -1)}
    if grouped and "enable_gqa" in taken:
        how["enable_gqa"] = True
    elif grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    limits = (segments.cu_seqlens_q, segments.cu_seqlens_kv, segments.max_seqlen_q, segments.max_seqlen_kv)
    if scale is not None and "scale" in taken:
        how["scale"] = scale
    elif scale is not None:  # torch 2.10 has its own alone
        query = query * (scale * query.shape[2] ** 0.5)
    out = varlen_attn(query, key, value, *limits, **how)
    assert isinstance(out, Tensor)  # the log-sum-exp was not asked for
    return out.flatten(1)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters' names; cached, as looking them up takes as long as a kernel."""
    return frozenset(inspect.signature(function).parameters)


KERNELS: dict[str, Kernel] = {
    "flash_attention_4": _flash_attention_4,
    "transformer_engine": transformer_engine.attention_over_pack,
    "flash_attention": _flash_attention,
    "variable_length": _variable_length,
}
"""Kernels that take a pack in one call, for half precision without dropout, in `platform.attention_kernels`' order."""
WIDEST = 128
"""Largest head width for which Transformer Engine's kernel is preferred."""


def choose_kernel(config: TransformerConfig, sees_images: bool = False) -> str:
    """Return the name of the kernel for packs on this machine and precision: one of `KERNELS`, or "sample_by_sample".

    `sees_images`: segments are many and short, images or windows of them.
    """
    half, width = config.params_dtype in (torch.bfloat16, torch.float16), config.kv_channels
    if not half or config.attention_dropout:
        return "sample_by_sample"
    at_a_loss = {"transformer_engine"} if sees_images or width > WIDEST else set[str]()
    return min(platform.attention_kernels(width), key=at_a_loss.__contains__, default="sample_by_sample")


@cache
def _say(name: str) -> None:
    """Print the kernel's name on the first rank, once a process."""
    print_rank_0(printable(f"attention over packs: {name.replace('_', ' ')}"))
