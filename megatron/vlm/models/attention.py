"""Attention that never looks across samples: the `core_attention` of every layer of ours."""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.vlm import platform
from megatron.vlm.microbatch import Segments


class IsolatedAttention(MegatronModule):
    """Softmax attention inside each sample of a pack (causal), or inside each tile of a batch (bidirectional).

    Shapes in and out are core's: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]. A pack
    has b = 1 and brings its `Segments`; tiles have none, each column of the batch is one tile. Cost: sum of len^2.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, **_: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.causal = attn_mask_type == AttnMaskType.causal

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
        if packed_seq_params is None:
            return self._tiles(query, key, value)
        if platform.HAS_CUDA and query.dtype in (torch.bfloat16, torch.float16):
            return _variable_length(query, key, value, packed_seq_params, self.causal)
        return self._sample_by_sample(query, key, value, packed_seq_params)

    def _tiles(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=_grouped(query, key))
        return out.permute(2, 0, 1, 3).flatten(2)

    def _sample_by_sample(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        # [T, 1, heads, d] -> [1, heads, T, d], cut into samples
        splits = (tensor.permute(1, 2, 0, 3).split(segments.lengths, dim=2) for tensor in (query, key, value))
        grouped = _grouped(query, key)
        samples = [
            scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
            for q, k, v in zip(*splits, strict=True)
        ]
        return torch.cat(samples, dim=2).permute(2, 0, 1, 3).flatten(2)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[2] != key.shape[2]


def _variable_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Torch's own flash attention over a packed sequence; one kernel for the whole pack."""
    from torch.nn.attention.varlen import varlen_attn

    if _grouped(query, key):
        repeats = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
    out = varlen_attn(
        query.squeeze(1),
        key.squeeze(1),
        value.squeeze(1),
        segments.cu_seqlens_q,
        segments.cu_seqlens_kv,
        segments.max_seqlen_q,
        segments.max_seqlen_kv,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    assert isinstance(out, Tensor)  # the log-sum-exp was not asked for
    return out.flatten(1).unsqueeze(1)
