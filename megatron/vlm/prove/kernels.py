"""Kernels of attention under which packs are tried; flash-attention's by a stand-in that obeys its lengths, on any
device. Private names of transformers are in this file alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from omnibal_ext.errors import UserError
from omnibal_ext.joining.checks import KERNELS

NAMES = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""Of ours, transformers'."""


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Let a model attend by a kernel of NAMES. Raises UserError where it cannot."""
    from transformers import modeling_flash_attention_utils as theirs
    from transformers import modeling_utils

    if name == "flash" and not model._supports_flash_attn:
        raise UserError("transformers does not run this model with flash-attention")
    lacking = [package for module, package in KERNELS.items() if not find_spec(module)]
    if lacking and "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise UserError(f"layers of linear attention keep samples apart with {' and '.join(lacking)}, not installed")
    taken = theirs._lazy_define_process_function(flash_attn_varlen_func)
    functions = (flash_attn_func, flash_attn_varlen_func, None, theirs._pad_input, theirs._unpad_input)
    of_model: Any = modeling_utils.PreTrainedModel
    replaced = {
        (theirs, "lazy_import_flash_attention"): lambda *_, **__: (functions, (taken, dict)),
        (modeling_utils, "lazy_import_flash_attention"): lambda *_, **__: None,
        (of_model, "_flash_attn_can_dispatch"): lambda *_, **__: True,
    }
    kept = {key: getattr(*key) for key in replaced}
    try:
        for key, value in replaced.items():
            setattr(*key, value)
        model.set_attn_implementation(NAMES[name])
        yield
    except (ValueError, ImportError) as error:
        raise UserError(f"transformers does not run this model with {name}: {error}") from error
    finally:
        for key, value in kept.items():
            setattr(*key, value)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Attention within sequences of equal boundaries [sequences + 1], as flash-attention's of this name: queries [T,
    heads, D], keys and values [T, groups, D]; `window_size`: keys before and after that are seen, -1: all."""
    groups, places = q.shape[1] // k.shape[1], torch.arange(len(q))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    sequence = torch.bucketize(places, cu_seqlens_q[1:].long(), right=True)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = places - places[:, None]
    before, after = (len(q) if side < 0 else side for side in window_size)
    seen = (sequence[:, None] == sequence) & (ahead >= -before) & (ahead <= (0 if causal else after))
    attended = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", attended, v) * (sequence < len(cu_seqlens_q) - 1)[:, None, None]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The same of a batch [B, T, heads, D], each row a sequence."""
    ends = torch.arange(len(q) + 1) * q.shape[1]
    return flash_attn_varlen_func(*(one.flatten(0, 1) for one in (q, k, v)), ends, ends, **how).view_as(q)
