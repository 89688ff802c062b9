"""Scaled dot-product attention over batches and packs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class DotProductAttention(torch.nn.Module):
    """No weights."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, sequence_parallel: bool = False, tp_size: int = 1,
        get_rng_state_tracker: Any = None, tp_group: Any = None, layer_number: int | None = None,
        attention_type: str = "self", cp_group: Any = None, cp_global_ranks: Any = None, cp_stream: Any = None,
        cp_comm_type: str = "p2p", softmax_scale: float | None = None, softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert attention_dropout == 0.0
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.heads, self.groups = num_attention_heads // tp_size, (num_gqa_groups or num_attention_heads) // tp_size
        self.width, self.scale = kv_channels, softmax_scale

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None = None,
        qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, fast_zero_fill: bool = True, inference_params: Any = None,
        pad_between_seqs: bool | None = None, fp8_output: bool | None = False, num_splits: int | None = 1,
    ) -> Tensor:  # fmt: skip
        """[s, b, heads, d] -> [s, b, heads * d], or [T, heads, d] -> [T, heads * d]."""
        layout, mask = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        assert query_layer.shape[-2:] == (self.heads, self.width), (query_layer.shape, self.heads, self.width)
        assert key_layer.shape[-2] == self.groups
        if layout == "thd":
            assert mask in ("padding_causal", "padding")
            assert cu_seqlens_q is not None
            assert query_layer.dtype in (torch.float16, torch.bfloat16), "no THD kernel in this precision"
            layers = (query_layer.unsqueeze(1), key_layer.unsqueeze(1), value_layer.unsqueeze(1))
            if query_layer.device.type == "shapes":  # there are no lengths to be read
                return _attend(*layers, causal=mask == "padding_causal", scale=self.scale).squeeze(1)
            with torch._C.DisableTorchFunction():  # a kernel reads them where they are: no host waits
                lengths = cu_seqlens_q.diff().tolist()
            assert max_seqlen_q == max_seqlen_kv == max(lengths)
            samples = zip(*(layer.split(lengths) for layer in layers), strict=True)
            causal, scale = mask == "padding_causal", self.scale
            return torch.cat([_attend(*sample, causal=causal, scale=scale) for sample in samples]).squeeze(1)
        assert layout == "sbhd"
        assert mask in ("causal", "no_mask")
        return _attend(query_layer, key_layer, value_layer, causal=mask == "causal", scale=self.scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    q, k, v = (layer.permute(1, 2, 0, 3) for layer in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).flatten(2)
