"""Gains of a layer's matrix products in float8 (`--fp8-format hybrid`): measured; nothing is trained so here.

A matrix has three products with the tokens of a full pack: output, gradients of input and weight. In float8 each tensor
has one scale and is cast each time, both as it is and transposed; the casts count.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.profiling.stopwatch import WARM_UP, Timer
from omnibal_ext.costs.profile import LayerCost

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # that rows and columns of products in float8 must be of


def float8_gains(stage: Stage, cost: LayerCost, tokens: int, steps: int) -> dict[str, float]:
    """Measure the gain in float8, bf16's seconds by float8's, of each matrix of a stage's first layer, and of the
    "layer", which costs `cost`; {} if float8 multiplies none. Experts' matrices, which see few tokens each, are left
    out."""
    seconds, saved, tokens = cost.forward_seconds + cost.backward_seconds, 0.0, tokens - tokens % MULTIPLE
    found: dict[str, float] = {}
    for name, weight in stage.run_links[0][1].named_parameters():
        fits = weight.dim() == 2 and not any(side % MULTIPLE for side in weight.shape)
        if fits and tokens and getattr(weight, "allreduce", True):
            bf16, float8 = (_seconds(way, weight.shape, tokens, steps) for way in (in_half, in_float8))
            found[name.removesuffix(".weight").rpartition(".")[2]] = bf16 / float8
            saved += bf16 - float8
    return found | {"layer": seconds / (seconds - saved)} if found else {}


def in_half(entering: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply [tokens, columns], [rows, columns], [tokens, rows] -> output, gradients of input and weight."""
    return entering @ weight.t(), gradient @ weight, gradient.t() @ entering


def in_float8(entering: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply as `in_half`, with all three cast to float8."""
    x, x_turned, x_scale = _cast(entering, ACTIVATION)
    w, w_turned, w_scale = _cast(weight, ACTIVATION)
    g, g_turned, g_scale = _cast(gradient, GRADIENT)
    pairs = ((x, x_scale, w, w_scale), (g, g_scale, w_turned, w_scale), (g_turned, g_scale, x_turned, x_scale))
    first, second, third = (
        torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=entering.dtype) for a, of_a, b, of_b in pairs
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
    given = (torch.arange(a * b, device="cuda", dtype=torch.float32).sin().bfloat16().view(a, b) for a, b in sizes)
    work, timer = partial(way, *given), Timer()
    return median([timer(work, before=work)[0] for _ in range(WARM_UP + steps)][WARM_UP:])
