"""Normalisation layers, with what tensor and sequence parallelism ask of them."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from megatron.vlm.models.padding import loads_without_padding, zero_padding


def build_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, kind: str | None = None
) -> torch.nn.Module:
    """RMSNorm or LayerNorm, as `kind` or else `config.normalization` says.

    Under sequence parallelism a rank sees a share of the tokens: the mark makes Megatron sum the gradients over ranks.
    """
    build = torch.nn.RMSNorm if (kind or config.normalization) == "RMSNorm" else torch.nn.LayerNorm
    norm = build(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Megatron marks weights so)
    return norm


class FullWidthRMSNorm(torch.nn.Module):
    """RMSNorm of a query or key over all `heads` together (InternViT-6B), not head by head.

    Under tensor parallelism a rank holds some heads: the sum of squares is reduced over the group, in both directions.
    Heads that only fill up the group are zero and do not count. Input and output [s, b, local heads, d].
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

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., heads of this rank, width of a head] -> the same; the mean of squares is over all ranks' heads."""
        wide = hidden.float()
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        if self.group.size() > 1:
            squares = all_reduce(squares, group=self.group)
        normalised = (wide * torch.rsqrt(squares / self.width + self.eps)).type_as(hidden)
        return normalised * self.weight.view(hidden.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The weight is cut along its only axis, like the heads it belongs to."""
        return loads_without_padding(
            make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
            )
        )
