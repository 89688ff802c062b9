"""Per-layer inputs (Gemma 4 E2B): a language layer adds a second branch to its output, computed from other inputs.

    word ── a row of this layer's table ────────────────── + ── x ── a matrix ── norm ── + ──>
    first hidden states ── a matrix ── norm, of all layers ┘    │                       │
    hidden states ── a matrix ── GELU ───────────────────────── ┘                       │
    hidden states ───────────────────────────────────────────────────────────────────── ┘

In transformers the tables of all layers are one weight, and so are the matrices behind the first hidden states. Here
each layer has its slice, so that it is on the layer's stage. The width between the matrices is tensor-parallel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import embedding

from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.recompute import run_recomputed
from omnibal_ext.modalities.language.layer import LayerInputs


class Numbers(NamedTuple):
    """Constants of a layer's second input."""

    width: int
    epsilon: float
    scale: float
    """Factor of the projected first hidden states."""
    of_rows: float
    """Factor of a table's rows, rounded to the weights' precision."""
    activation: Callable[[Tensor], Tensor]


class LayerInput(MegatronModule):
    """The second input of one layer: hidden states and first ones [rows here, 1, width], words [T] -> hidden states."""

    def __init__(self, config: TransformerConfig, inputs: LayerInputs) -> None:
        super().__init__(config)
        width, self.blank = inputs.width, inputs.blank
        of_rows = torch.tensor(width**0.5, dtype=config.params_dtype, device="cpu").item()
        scale = config.hidden_size**-0.5
        self.numbers = Numbers(width, config.layernorm_epsilon, scale, of_rows, config.activation_func)
        into: dict[str, Any] = {"config": config, "bias": False, "gather_output": False}
        draw = config.init_method
        self.gate = ColumnParallelLinear(config.hidden_size, width, init_method=draw, **into)
        self.context = ColumnParallelLinear(config.hidden_size, width, init_method=draw, **into)
        self.projection = RowParallelLinear(
            width, config.hidden_size, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=False,
        )  # fmt: skip
        self.norm = build_norm(config, config.hidden_size, config.layernorm_epsilon)
        self.group = self.gate.tp_group
        whole = torch.empty(inputs.words, width)
        config.embedding_init_method(whole)
        part = whole.chunk(self.group.size(), dim=1)[self.group.rank()]
        self.table = torch.nn.Parameter(part.to(config.params_dtype, copy=True).contiguous())
        tensor_parallel.set_tensor_model_parallel_attributes(self.table, is_parallel=True, dim=1, stride=1)

    def forward(self, hidden: Tensor, words: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        """Return hidden states plus the second input's branch; `weight` [width]: of the norm that all layers share."""
        gate, _ = self.gate(hidden)
        context, _ = self.context(first)
        rows = embedding(words, self.table, padding_idx=self.blank).unsqueeze(1)
        squares = _sum_of_squares(context)
        if self.group.size() > 1:
            squares = all_reduce(squares, group=self.group)
        here = weight.chunk(self.group.size())[self.group.rank()]
        own, _ = self.projection(run_recomputed(_combined, gate, context, squares, here, rows, self.numbers))
        return hidden + self.norm(own)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return core's entries and the table's, which is cut along its second axis."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        groups = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        own = make_sharded_tensors_for_checkpoint(
            {"table": self.table}, prefix, {"table": 1}, sharded_offsets, tp_group=self.group, dp_cp_group=groups
        )
        return dict(state) | own


@jit_fuser
def _sum_of_squares(context: Tensor) -> Tensor:
    """Sum the squares of the last axis, fp32 [..., 1]."""
    return context.float().square().sum(dim=-1, keepdim=True)


@jit_fuser
def _combined(gate: Tensor, context: Tensor, squares: Tensor, weight: Tensor, rows: Tensor, numbers: Numbers) -> Tensor:
    """Add the normalised context and the table's rows, and multiply by the activated gate."""
    normalised = context.float() * (
        numbers.scale * torch.rsqrt(numbers.scale**2 * squares / numbers.width + numbers.epsilon)
    )
    own = (normalised * weight.float()).type_as(context) + rows * numbers.of_rows
    return numbers.activation(gate) * (own * 2**-0.5)
