"""Gated DeltaNet instead of attention: Qwen3.5's linear layers (arXiv 2412.06464).

    hidden ── linear_qkv ──┬─ query, key, values ── convolution ──┐
                           ├─ what is kept, what is learned ──────┴─ delta rule ── norm ──┐
                           └─ gate of every value ────────────────────────── silu ────────*── linear_proj ── out

A head of queries and keys with its heads of values is a group. Weights are ordered by group, so that tensor parallelism
splits between groups; if its size does not divide them, they are padded (`attention.padding`). Core's own layer needs
flash-linear-attention, and a tensor-parallel size that divides the heads.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.jit import jit_fuser
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron.vlm import platform
from megatron.vlm.microbatch import HeadExchange, Microbatch, Segments, segments_of
from megatron.vlm.models.attention.padding import loads_without_padding
from megatron.vlm.models.exchange import heads_to_rows, rows_to_groups
from megatron.vlm.models.linear import convolution, delta_rule
from megatron.vlm.models.linear.delta_rule import Chunks, chunk_indices
from megatron.vlm.models.recompute import run_recomputed
from omnibal_ext.modalities.language.linear_attention import LinearAttention

CUT = {"convolution": 0, "a_log": 0, "dt_bias": 0}
"""Names of the layer's own tensor-parallel weights, and the axis each is cut along."""


@dataclass(frozen=True)
class Runs:
    """Boundaries and positions of a pack's samples for linear layers, made once for all layers."""

    segments: Segments
    positions: Tensor
    """[T], position of each row in its sample."""
    chunks: Chunks | Tensor
    """Chunks of the samples; for flash-linear-attention's kernels `chunk_indices`."""
    exchange: HeadExchange | None = None
    """The exchange of split samples, which are the first rows; None: no sample is split."""
    together: "Runs | None" = None
    """The split samples whole, as this rank computes some groups of them."""

    @classmethod
    def of(cls, batch: Microbatch, dtype: torch.dtype, exchange: HeadExchange | None = None) -> "Runs":
        """Find where a pack's samples are, for layers of this precision; `exchange`: of samples that ranks share."""
        if exchange is None or batch.shard is None:
            return cls._of_segments(batch.segments, batch.positions, dtype)
        own = segments_of(batch.lengths[batch.shard.split_segments :])
        apart = cls._of_segments(own, batch.positions[exchange.rows[exchange.team_rank] :], dtype)
        positions = torch.cat([torch.arange(length) for length in exchange.segments.lengths])
        together = cls._of_segments(exchange.segments, platform.to_device(positions), dtype)
        return replace(apart, exchange=exchange, together=together)

    @classmethod
    def _of_segments(cls, segments: Segments, positions: Tensor, dtype: torch.dtype) -> "Runs":
        chunks = chunk_indices if by_kernels(dtype) or not segments.lengths else Chunks.of
        return cls(segments, positions, chunks(segments.lengths))


def by_kernels(dtype: torch.dtype) -> bool:
    """Check whether flash-linear-attention computes layers of this precision here; it rounds fp32 to TF32."""
    return platform.HAS_LINEAR_ATTENTION and dtype in (torch.bfloat16, torch.float16)


class GatedDeltaNet(MegatronModule):
    """Linear attention: this rank's rows [s, 1, width] -> [s, 1, width]. `into`, `out_of`: its projections' classes."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        linear: LinearAttention,
        into: Any,
        out_of: Any,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.linear, self.layer_number, self.tp_group = linear, layer_number, pg_collection.tp
        groups = linear.groups_over(self.tp_group.size())
        self.groups = groups // self.tp_group.size()
        common = {"config": config, "is_expert": False, "tp_group": self.tp_group}
        self.linear_qkv = into(
            config.hidden_size, groups * linear.projected, init_method=config.init_method, gather_output=False,
            skip_bias_add=False, tp_comm_buffer_name="qkv", **common,
        )  # fmt: skip
        self.linear_proj = out_of(
            groups * linear.heads_a_group * linear.value_width, config.hidden_size,
            init_method=config.output_layer_init_method, bias=False, input_is_parallel=True, skip_bias_add=True,
            tp_comm_buffer_name="proj", **common,
        )  # fmt: skip
        # As in the paper's code: a convolution's usual draw; a head keeps e^(-A dt), dt from 0.001 to 0.1.
        bound, heads = linear.kernel**-0.5, groups * linear.heads_a_group
        channels = torch.empty(linear.groups * linear.convolved, linear.kernel).uniform_(-bound, bound)
        self.convolution = self._part(channels, groups * linear.convolved)
        self.a_log = self._part(torch.empty(linear.heads).uniform_(0.01, 16).log(), heads)
        steps = torch.empty(linear.heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = self._part(steps.expm1().log(), heads)  # softplus of it is the step
        self.norm_weight = torch.nn.Parameter(torch.ones(linear.value_width, dtype=config.params_dtype))

    def _part(self, whole: Tensor, filled: int) -> torch.nn.Parameter:
        """Cut this rank's shard of a weight that is padded with zeros to `filled` rows."""
        rows = torch.cat([whole, whole.new_zeros(filled - len(whole), *whole.shape[1:])])
        part = rows.chunk(self.tp_group.size())[self.tp_group.rank()].to(self.config.params_dtype, copy=True)
        parameter = torch.nn.Parameter(part)
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(self, hidden: Tensor, packed_seq_params: Runs, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Map this rank's rows [s, 1, width] to [s, 1, width], and no bias (None): core expects both."""
        projected, _ = self.linear_qkv(hidden)
        out: tuple[Tensor, Tensor | None] = self.linear_proj(self._core(projected, packed_seq_params))
        return out

    def _core(self, projected: Tensor, runs: Runs) -> Tensor:
        """Map projected rows [T, 1, groups here * width of a group] to values [T, 1, width of all heads here]."""
        rows = projected.view(len(projected), self.groups, self.linear.projected)
        if runs.exchange is None or runs.together is None:
            return self._inside(rows, runs, 0, self.groups).unsqueeze(1)
        cut = runs.exchange.rows[runs.exchange.team_rank]
        met, (first, end) = rows_to_groups(rows[:cut], runs.exchange)
        out = self._inside(met, runs.together, first, end)
        values = self.linear.heads_a_group * self.linear.value_width
        parts = heads_to_rows(out.view(len(out), -1, values), self.groups, runs.exchange).flatten(1)
        return torch.cat([parts, self._inside(rows[cut:], runs, 0, self.groups)]).unsqueeze(1)

    def _inside(self, rows: Tensor, runs: Runs, first: int, end: int) -> Tensor:
        """Map whole samples [T, groups, width of one], groups `first` to `end`, to values [T, width of their heads]."""
        linear, values = self.linear, self.linear.heads_a_group * self.linear.value_width
        if not rows.numel():  # others of the team have them; gradients of all weights are waited for
            weights = (self.convolution, self.a_log, self.dt_bias, self.norm_weight)
            return rows.new_zeros(len(rows), (end - first) * values) + sum(part[:0].sum() for part in (rows, *weights))
        # Tensors of their own: as parts of what was projected they would keep all of it.
        mixed, gate, rate, alpha = (
            part.contiguous()
            for part in rows.split([linear.convolved, values, linear.heads_a_group, linear.heads_a_group], dim=-1)
        )
        heads = slice(first * linear.heads_a_group, end * linear.heads_a_group)
        channels = self.convolution[first * linear.convolved : end * linear.convolved]
        decay, rate = _paces(alpha.flatten(1), rate.flatten(1), self.a_log[heads], self.dt_bias[heads])
        mixed = self._convolved(mixed.flatten(1), channels, runs).view_as(mixed)
        if isinstance(runs.chunks, Chunks):
            out = run_recomputed(_in_chunks, mixed, decay, rate, linear, runs.chunks)
        else:
            out = delta_rule.by_kernel(*_heads(mixed, linear), decay, rate, runs.segments.cu_seqlens_q, runs.chunks)
        # Under tensor parallelism a rank has some of the heads that share the weight.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm_weight)
        return run_recomputed(_gated_norm, out, gate.view_as(out), weight, self.config.layernorm_epsilon)

    def _convolved(self, rows: Tensor, channels: Tensor, runs: Runs) -> Tensor:
        if isinstance(runs.chunks, Chunks):
            return run_recomputed(convolution.by_shifts, rows, channels, runs.positions)
        return convolution.by_kernel(rows, channels, runs.segments.cu_seqlens_q, runs.chunks)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return core's entries and the layer's own, cut along their first axis; any group size can read them."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: getattr(self, name) for name in CUT}
        groups = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        cut = make_sharded_tensors_for_checkpoint(
            own, prefix, CUT, sharded_offsets, tp_group=self.tp_group, dp_cp_group=groups
        )
        return state | loads_without_padding(cut)


def _heads(mixed: Tensor, linear: LinearAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Split the convolution's output [T, groups, numbers] into query and key, repeated for each head of values, and
    values, [T, heads, width] each."""
    query, key, value = mixed.split(
        [linear.key_width, linear.key_width, linear.heads_a_group * linear.value_width], dim=-1
    )
    query, key = (one.repeat_interleave(linear.heads_a_group, dim=1) for one in (query, key))
    return query, key, value.reshape(len(value), -1, linear.value_width)


def _in_chunks(mixed: Tensor, decay: Tensor, rate: Tensor, linear: LinearAttention, chunks: Chunks) -> Tensor:
    return delta_rule.in_chunks(*_heads(mixed, linear), decay, rate, chunks)


@jit_fuser
def _paces(alpha: Tensor, rate: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the state's decay per token, fp32, and the rate at which it learns."""
    return -a_log.float().exp() * softplus(alpha.float() + dt_bias), rate.sigmoid()


@jit_fuser
def _gated_norm(out: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise each head's values, times silu of their gates: [T, heads, width] twice -> [T, heads x width]."""
    wide = out.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(out.dtype) * weight
    return (normed * silu(gate.float())).to(out.dtype).flatten(1)
