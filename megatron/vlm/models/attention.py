"""Attention that never looks across samples: the `core_attention` of every layer of ours.

| where | tokens of a pack | tiles of a batch |
|---|---|---|
| Transformer Engine is installed, half precision | its THD kernels, one call a pack | torch, one call a batch |
| CUDA, half precision | torch's variable-length flash attention, one call a pack | torch, one call a batch |
| elsewhere, or with dropout | torch, sample by sample | torch, one call a batch |
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.utils import print_rank_0
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.vlm import platform
from megatron.vlm.microbatch import Segments

Kernel = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
"""Attention over a pack: query [T, heads, d], key and value [T, groups, d], boundaries -> [T, heads, d]."""


class IsolatedAttention(MegatronModule):
    """Softmax attention inside each sample of a pack (causal), or inside each tile of a batch (bidirectional).

    Shapes in and out are core's: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]. A pack
    has b = 1 and brings its `Segments`; tiles have none, each column of the batch is one tile. Cost: sum of len^2.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, **_: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.causal = attn_mask_type == AttnMaskType.causal
        if self.causal:
            name = choose_kernel(config)
            _say(name)
            self.over_pack: Kernel = getattr(self, f"_{name}")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Segments | None = None,
    ) -> Tensor:
        """Query, key, value [T, 1, heads, width] -> [T, 1, heads x width], sample by sample of the pack."""
        if packed_seq_params is None:
            return self._by_torch(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)).transpose(0, 1)
        out = self.over_pack(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params)
        return out.flatten(1).unsqueeze(1)

    def _by_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A batch of sequences of one length: query [b, s, heads, d] -> [b, s, heads * d]."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        # Heads differ between ranks, so do their masks; under sequence parallelism the whole layer draws so already.
        own = dropout and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if own else nullcontext():
            out = scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=self.causal, enable_gqa=query.shape[2] != key.shape[2]
            )
        return out.transpose(1, 2).flatten(2)

    def _sample_by_sample(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        splits = (tensor.unsqueeze(0).split(segments.lengths, dim=1) for tensor in (query, key, value))
        return torch.cat([self._by_torch(*sample) for sample in zip(*splits, strict=True)], dim=1).squeeze(0)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        taken, grouped = inspect.signature(varlen_attn).parameters, query.shape[1] != key.shape[1]
        # torch 2.10 has a switch for causal attention, later ones a window; groups of heads are known from 2.12 on.
        how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in taken else {"is_causal": True}
        if grouped and "enable_gqa" in taken:
            how["enable_gqa"] = True
        elif grouped:
            repeats = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        limits = (segments.cu_seqlens_q, segments.cu_seqlens_kv, segments.max_seqlen_q, segments.max_seqlen_kv)
        out = varlen_attn(query, key, value, *limits, **how)
        assert isinstance(out, Tensor)  # the log-sum-exp was not asked for
        return out

    def _transformer_engine(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        return _thd_kernel(query.shape[1], key.shape[1], query.shape[2])(
            query,
            key,
            value,
            cu_seqlens_q=segments.cu_seqlens_q,
            cu_seqlens_kv=segments.cu_seqlens_kv,
            max_seqlen_q=segments.max_seqlen_q,
            max_seqlen_kv=segments.max_seqlen_kv,
            attn_mask_type="padding_causal",
        )


def choose_kernel(config: TransformerConfig) -> str:
    """The kernel for packs here, in this precision: the name of a method of `IsolatedAttention` without underscore."""
    half = config.params_dtype in (torch.bfloat16, torch.float16)
    if not platform.HAS_CUDA or not half or config.attention_dropout:
        return "sample_by_sample"
    if platform.HAS_TRANSFORMER_ENGINE:
        return "transformer_engine"
    return "variable_length" if platform.HAS_VARIABLE_LENGTH else "sample_by_sample"


@cache
def _thd_kernel(heads: int, groups: int, width: int) -> Callable[..., Tensor]:
    """Transformer Engine's attention; one for all layers, none of which owns it: it has no weights to be saved."""
    from transformer_engine.pytorch import DotProductAttention

    kernel: Callable[..., Tensor] = DotProductAttention(heads, width, num_gqa_groups=groups, qkv_format="thd")
    return kernel


@cache
def _say(name: str) -> None:
    """Once a process, in the log of the first rank."""
    print_rank_0(f"attention over packs: {name.replace('_', ' ')}")
