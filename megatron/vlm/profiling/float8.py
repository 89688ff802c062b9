"""Gains of a layer's matrix products in float8 (`--fp8-format hybrid`): measured; nothing is trained so here.

A matrix has three products with the tokens of a full pack: output, gradients of input and weight. In float8 each tensor
has one scale and is cast each time, both as it is and transposed; the casts count.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.profiling.stopwatch import median_seconds
from omnibal_ext.costs.profile import LayerCost
from omnibal_ext.output import say

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # that rows and columns of products in float8 must be of


def float8_gains(stage: Stage, cost: LayerCost, tokens: int, steps: int) -> dict[str, float]:
    """Measure how many times faster float8 is than bf16, {name: ratio}: for each matrix of a stage's first layer, and
    "layer" for all of it, which takes `cost`. {} if `--fp8-format` reaches none, or if a product fails here."""
    try:
        return _gains(stage, cost, tokens, steps)
    except RuntimeError as error:  # of cuBLAS, the allocator or the compiler: what was measured before stays
        say(f"float8 was not measured: {str(error).partition(chr(10))[0]}", error=True)
        return {}


def _gains(stage: Stage, cost: LayerCost, tokens: int, steps: int) -> dict[str, float]:
    seconds, saved, tokens = cost.forward_seconds + cost.backward_seconds, 0.0, tokens - tokens % MULTIPLE
    found: dict[str, float] = {}
    for name, weight in stage.run_layers[0][1].named_parameters():
        matrix = name.removesuffix(".weight").rpartition(".")[2]
        fits = weight.dim() == 2 and not any(side % MULTIPLE for side in weight.shape)
        if fits and tokens and matrix.startswith("linear_"):
            bf16, float8 = (_seconds(way, weight.shape, tokens, steps) for way in (in_half, in_float8))
            found[matrix] = bf16 / float8
            saved += bf16 - float8
    return found | {"layer": seconds / (seconds - saved)} if found else {}


def in_half(entering: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a linear layer's output and both gradients, of input [n, in], weight [out, in], gradient [n, out]."""
    return entering @ weight.t(), gradient @ weight, gradient.t() @ entering


def in_float8(entering: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three products of `in_half` with tensors cast to float8; only the first adds up fast, as in TE."""
    x, x_turned, x_scale = _cast(entering, ACTIVATION)
    w, w_turned, w_scale = _cast(weight, ACTIVATION)
    g, g_turned, g_scale = _cast(gradient, GRADIENT)
    pairs = ((x, x_scale, w, w_scale), (g, g_scale, w_turned, w_scale), (g_turned, g_scale, x_turned, x_scale))
    first, second, third = (
        torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=entering.dtype, use_fast_accum=b is w)
        for a, of_a, b, of_b in pairs
    )
    return first, second, third


@torch.compile
def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensor in `dtype`, its transpose, and the scale of both, fp32."""
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    cast = (tensor / scale).to(dtype)
    return cast, cast.t().contiguous(), scale


@torch.no_grad()
def _seconds(way: Callable[..., object], shape: torch.Size, tokens: int, steps: int) -> float:
    rows, columns = shape
    sizes = ((tokens, columns), (rows, columns), (tokens, rows))
    given = (torch.outer(*(torch.arange(side, device="cuda").sin().bfloat16() for side in size)) for size in sizes)
    return median_seconds(partial(way, *given), steps)
