"""What carries states."""

from typing import Any

import torch
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Between `cu_seqlens` each part by itself."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    given: dict[str, Any] = {
        "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }  # fmt: skip
    rows = zip(*(one.split(lengths, 1) for one in (q, k, v, g, beta)), strict=True)
    found = [torch_chunk_gated_delta_rule.__wrapped__(*row, **given) for row in rows]
    return torch.cat([out for out, _ in found], 1), found[-1][1]


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
