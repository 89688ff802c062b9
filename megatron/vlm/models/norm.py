"""Normalisation layers whose weights are right under tensor and sequence parallelism."""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.jit import jit_fuser
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import dropout, rms_norm

from megatron.vlm.models.attention.padding import loads_without_padding, zero_padding


def build_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, kind: str | None = None
) -> torch.nn.Module:
    """Build RMSNorm, CentredRMSNorm or LayerNorm, as `kind` or else the configuration says.

    Under sequence parallelism a rank sees a share of the tokens: the mark makes Megatron sum the gradients over ranks.
    """
    usual = "CentredRMSNorm" if config.layernorm_zero_centered_gamma else config.normalization
    norm = NORMS[kind or usual](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Megatron marks weights so)
    return norm


class CentredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies with 1 + weight, in fp32 (Gemma): [..., width] -> [..., width]."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last axis."""
        return _centred(hidden, self.weight, self.eps)


@jit_fuser
def _centred(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = hidden.float()
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (normalised * (1.0 + weight.float())).type_as(hidden)


NORMS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm, "CentredRMSNorm": CentredRMSNorm}


class HeadRMSNorm(torch.nn.RMSNorm):
    """RMSNorm of every head [s, b, local heads, d] by itself, with one weight for all heads (Qwen3, Gemma 3).

    Under tensor parallelism a rank has some of the heads: the weight's gradient is summed over the group in the
    backward pass. (Core sums it at the end of the iteration, by a name that the ViT's full-width norms have too, whose
    weights are sharded.)
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.centred = config.layernorm_zero_centered_gamma
        if self.centred:
            torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last axis; the weight's gradient is summed over the tensor-parallel group."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.weight)
        if not torch.compiler.is_compiling():
            # A key of its own: as a part of what was projected it would keep query and value for backward.
            hidden = hidden.contiguous()
        if self.centred:
            return _centred(hidden, weight, self.eps)
        return rms_norm(hidden, self.normalized_shape, weight, self.eps)


def normalised_heads(hidden: Tensor, epsilon: float) -> Tensor:
    """Normalise every head by itself (RMSNorm) without a weight: [..., d] -> [..., d]."""
    # Of its own: as a part of what was projected it would keep query and key for backward.
    return rms_norm(hidden.contiguous(), hidden.shape[-1:], None, epsilon)


class BranchNormAdd(torch.nn.Module):
    """The residual connection behind a branch that ends in a norm (Gemma): residual + dropout(norm(x + bias)).

    Used instead of core's bias-dropout-add, and called like it: `forward(training, fused)` returns the function that
    adds.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = build_norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that core calls with (x, bias), residual and dropout probability."""
        return partial(self._add, training)

    def _add(
        self, training: bool, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        x, bias = x_with_bias
        return residual + dropout(self.norm(x if bias is None else x + bias), probability, training)


class FullWidthRMSNorm(torch.nn.Module):
    """RMSNorm of a query or key over all `heads` together (InternViT-6B), not head by head.

    Padding heads are zero and do not count. `normalise_together` applies two.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.width = heads * hidden_size
        self.eps = eps
        local = config.num_attention_heads * hidden_size // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))
        zero_padding(self.weight, 0, self.width, self.group)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the weight, cut along its only axis like the heads it belongs to."""
        return loads_without_padding(
            make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
            )
        )


def normalise_together(
    query: Tensor, key: Tensor, query_norm: FullWidthRMSNorm, key_norm: FullWidthRMSNorm
) -> tuple[Tensor, Tensor]:
    """Normalise query and key [s, b, local heads, d], each by its own norm.

    A tensor-parallel rank holds some heads: both sums of squares are reduced over the group at once, forward and back.
    """
    squares = _sums_of_squares(query, key)
    if query_norm.group.size() > 1:
        squares = all_reduce(squares, group=query_norm.group)
    of_query, of_key = squares.split(1, dim=-1)
    return (
        _scaled(query, of_query, query_norm.weight, query_norm.width, query_norm.eps),
        _scaled(key, of_key, key_norm.weight, key_norm.width, key_norm.eps),
    )


@jit_fuser
def _sums_of_squares(query: Tensor, key: Tensor) -> Tensor:
    """Sum the squares of query and key over the heads of this rank, fp32 [s, b, 1, 2]."""
    return torch.cat([t.float().square().sum(dim=(-2, -1), keepdim=True) for t in (query, key)], dim=-1)


@jit_fuser
def _scaled(hidden: Tensor, squares: Tensor, weight: Tensor, width: int, epsilon: float) -> Tensor:
    normalised = (hidden.float() * torch.rsqrt(squares / width + epsilon)).type_as(hidden)
    return normalised * weight.view(hidden.shape[-2:])
