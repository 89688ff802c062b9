"""Linear layers whose inputs and outputs are clamped to stored, untrained ranges (Gemma 4's ViT).

    x ── clamp ── W ── clamp ──

Query, key and value are one matrix here, as are gate and up, and each of them has ranges of its own. If their input
ranges are equal, there is one product, as usual. If they differ, the input is multiplied once for each of them, and
each product contributes only its own rows.

Inputs are clamped where they are computed, after a norm, the attention or the activation function, so that
recomputation clamps them again. Adapters are between the two clamps, as peft's are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.jit import jit_fuser
from torch import Tensor
from torch.nn.functional import pad

from omnibal_ext.modalities.vision.weights import CLIP_SUFFIX, CLIPPED


class Clip(torch.nn.Module):
    """The ranges of one linear layer: ranges [fused, 4] of input minimum, maximum, output minimum, maximum.

    They are untrained weights, which copies of a tower have too. Rows alternate: `share` of each fused matrix at a
    time."""

    def __init__(self, fused: int, share: int, dtype: torch.dtype) -> None:
        super().__init__()
        everything = torch.tensor([-torch.inf, torch.inf] * 2, dtype=dtype)
        self.ranges = torch.nn.Parameter(everything.repeat(fused, 1), requires_grad=False)
        self.share = share
        self.are_apart: bool | None = None
        """Whether input ranges of the fused matrices differ; None: not known yet."""

    def entering(self, rows: Tensor) -> Tensor:
        """Clamp [rows, 1, width] -> the same; where fused matrices differ in input ranges -> [rows, fused, width]."""
        if self.are_apart is None:  # the host waits once
            self.are_apart = bool((self.ranges[:, :2] != self.ranges[0, :2]).any())
        return _clamp_in(rows, self.ranges if self.are_apart else self.ranges[:1])

    def leaving(self, out: Tensor) -> Tensor:
        """Clamp the output for an input from `entering`: [rows, 1 or fused, local rows] -> [rows, 1, local rows]."""
        return _clamp_out(out, self.ranges, self.share)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self.are_apart = None


def clip(layer: Any, width: int, head: int) -> None:
    """Make a vision layer's linear layers clamp; `width`, `head`: of the model and of a head. Its norms are unfused."""
    attention, mlp = layer.self_attention, layer.mlp
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    for (name, fused), linear in zip(CLIPPED.items(), linears, strict=True):
        rows = head if name == "linear_qkv" else len(linear.weight) // fused
        layer.add_module(f"{name}{CLIP_SUFFIX}", Clip(fused, rows, linear.weight.dtype))
    qkv, proj, fc1, fc2 = (layer.get_submodule(f"{name}{CLIP_SUFFIX}") for name in CLIPPED)
    here = attention.linear_proj.weight.shape[1]
    true = min(max(width - parallel_state.get_tensor_model_parallel_rank() * here, 0), here)
    _then(layer.input_layernorm, qkv.entering)
    _then(attention.core_attention, partial(_of_true_heads, proj, true))
    _then(layer.pre_mlp_layernorm, fc1.entering)
    mlp.activate = partial(_activate, fc1, fc2)
    for linear, ranges in ((attention.linear_qkv, qkv), (attention.linear_proj, proj), (mlp.linear_fc2, fc2)):
        linear.register_forward_hook(partial(_leave, ranges))  # around whatever else takes the place of its `forward`


def _then(module: Any, clamp: Callable[[Tensor], Tensor]) -> None:
    """Make a module clamp its output from now on."""
    forward = module.forward
    module.forward = lambda *arguments, **options: clamp(forward(*arguments, **options))


def _of_true_heads(ranges: Clip, true: int, rows: Tensor) -> Tensor:
    """Clamp true heads only: padding heads stay zero, whatever the range, so that their weights get no gradient."""
    clamped, missing = ranges.entering(rows), rows.shape[-1] - true
    return pad(clamped[..., :true], (0, missing)) if missing else clamped


def _leave(ranges: Clip, _: Any, __: Any, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    out, bias = given
    return ranges.leaving(out), bias


def _activate(into: Clip, out_of: Clip, inner: Tensor, _: None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply the activation of a gated MLP without biases, with both clamps."""
    return _gated(inner, activation, into.ranges, into.share, out_of.ranges)


@jit_fuser
def _gated(
    inner: Tensor, activation: Callable[[Tensor], Tensor], leaving: Tensor, share: int, entering: Tensor
) -> Tensor:
    gate, up = _clamp_out(inner, leaving, share).chunk(2, dim=-1)
    return _clamp_in(activation(gate) * up, entering)


@jit_fuser
def _clamp_in(rows: Tensor, ranges: Tensor) -> Tensor:
    return torch.clamp(rows, ranges[:, :1], ranges[:, 1:2])


@jit_fuser
def _clamp_out(out: Tensor, ranges: Tensor, share: int) -> Tensor:
    outputs = out.unflatten(-1, (-1, len(ranges), share))
    if out.shape[1] > 1:  # each matrix of what it was given
        outputs = outputs.diagonal(dim1=1, dim2=3).movedim(-1, 2).unsqueeze(1)
    return torch.clamp(outputs, ranges[:, 2:3], ranges[:, 3:]).flatten(2)
