"""The ViT's layers of the chain: patch embedding and vision layers.

The tensor between them is rows of ViT tokens, [rows, 1, width]: the tiles' tokens, token by token (tile varies
fastest). Under sequence parallelism it is padded with rows of zeros until the tensor-parallel size divides them, and
each rank holds its share.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.jit import jit_fuser
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import dropout, pad

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.attention.core_attention import ImageAttention, TileAttention
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.draws import own_draws
from megatron.vlm.models.norm import (
    BranchNormAdd,
    FullWidthRMSNorm,
    HeadRMSNorm,
    build_norm,
    normalise_together,
    normalised_heads,
)
from megatron.vlm.models.perceptron import Perceptron
from megatron.vlm.models.region import RegionLayer
from megatron.vlm.models.specs import layer_submodules, set_projections
from megatron.vlm.models.tile_rows import SplitHeads
from omnibal_ext.modalities.modality import VISION, Size
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


def whole_matrix(
    config: TransformerConfig, columns: int, rows: int, bias: bool
) -> tensor_parallel.ColumnParallelLinear:
    """Build a matrix [rows, columns], column-parallel, whose output is gathered on all tensor-parallel ranks."""
    return tensor_parallel.ColumnParallelLinear(
        columns, rows, config=config, init_method=config.init_method, bias=bias, gather_output=True
    )


def shared_rows(rows: int, config: TransformerConfig) -> int:
    """Return the number of rows on each tensor-parallel rank where `rows` are shared, padding included."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return -(-rows // ranks)


def missing_rows(rows: int, config: TransformerConfig) -> int:
    """Return the number of padding rows behind `rows`, which make the tensor-parallel size divide them."""
    return -rows % (config.tensor_model_parallel_size if config.sequence_parallel else 1)


def share_rows(rows: Tensor, config: TransformerConfig) -> Tensor:
    """Pad and scatter [rows, 1, width] -> this rank's share; without sequence parallelism return them as they are."""
    if not config.sequence_parallel:
        return rows
    filled = pad(rows, (0, 0, 0, 0, 0, missing_rows(len(rows), config)))
    return tensor_parallel.scatter_to_sequence_parallel_region(filled)


def join_rows(shared: Tensor, rows: int, config: TransformerConfig) -> Tensor:
    """Gather the `rows` that `share_rows` scattered, without padding, for modules that all ranks run on all rows."""
    if not config.sequence_parallel:
        return shared
    joined: Tensor = tensor_parallel.gather_from_sequence_parallel_region(shared, tensor_parallel_output_grad=False)
    return joined[:rows]


class PatchEmbed(MegatronModule):
    """The layer from tiles to ViT tokens: patches, a class token where there is one, learned positions, CLIP's norm.

    pixels [tiles, 3, size, size] -> this rank's share of the tokens * tiles rows. `read`: the media that it embeds.
    """

    def __init__(self, config: TransformerConfig, architecture: VisionArchitecture, read: Size = VISION.size) -> None:
        super().__init__(config)
        self.read = read
        width, patch = architecture.hidden_size, architecture.patch_size
        self.projection = torch.nn.Conv2d(
            3, width, patch, stride=patch, bias=architecture.patch_bias, dtype=config.params_dtype
        )
        if architecture.class_token:
            self.class_token = torch.nn.Parameter(torch.empty(1, 1, width, dtype=config.params_dtype))
        self.positions = torch.nn.Parameter(
            torch.empty(architecture.tokens_per_tile, 1, width, dtype=config.params_dtype)
        )
        self.norm: torch.nn.Module = torch.nn.Identity()
        if architecture.pre_norm:
            self.norm = build_norm(outside_layers(config), width, architecture.norm_epsilon, "LayerNorm")
        learned = (self.class_token,) if architecture.class_token else ()
        for weight in (self.projection.weight, *learned, self.positions):
            config.init_method(weight.data)
        if self.projection.bias is not None:
            torch.nn.init.zeros_(self.projection.bias)

    def forward(self, hidden: None, batch: Microbatch) -> Tensor:
        """Map pixels of the pack's tiles to rows of ViT tokens, this rank's share."""
        pixels = batch.media_of(self.read).values
        assert pixels is not None
        tokens = self.projection(pixels.to(self.positions.dtype)).flatten(2).permute(2, 0, 1)
        if hasattr(self, "class_token"):
            tokens = torch.cat([self.class_token.expand(1, tokens.shape[1], -1), tokens])
        tokens = self.norm(tokens + self.positions)
        return share_rows(tokens.flatten(0, 1).unsqueeze(1), self.config)


class LayerScaleAdd(torch.nn.Module):
    """The residual connection of a vision layer: residual + kept * dropout(scale * (x + bias)).

    Used instead of core's bias-dropout-add, and called like it: `forward(training, fused)` returns the function that
    adds.
    """

    def __init__(self, width: int, initial: float, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((width,), initial, dtype=config.params_dtype))
        setattr(self.scale, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Megatron marks weights so)
        self.kept: Tensor | None = None
        """[rows, 1, 1] zero for tiles that skip this branch, 1 / (share kept) for the others; None: none skips it."""

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that core calls with (x, bias), residual and dropout probability."""
        return partial(_scale_add_fused if fused else _scale_add, self.scale, self.kept if training else None, training)


def _scale_add(
    scale: Tensor,
    kept: Tensor | None,
    training: bool,
    x_with_bias: tuple[Tensor, Tensor | None],
    residual: Tensor,
    probability: float,
) -> Tensor:
    x, bias = x_with_bias
    x = x if bias is None else x + bias
    branch = dropout(x * scale, probability, training)
    return residual + (branch if kept is None else branch * kept)


_scale_add_fused = jit_fuser(_scale_add)


class VisionAttention(SelfAttention):
    """Core's attention; a query's and a key's norm over all heads share one reduction over tensor-parallel ranks."""

    norms_values = False
    """Whether values have a norm without a weight."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project this rank's rows [n, 1, width] to query, key and value [all ViT tokens, 1, local heads, d]."""
        projected, _ = self.linear_qkv(hidden_states)
        heads = projected.view(*projected.shape[:-1], -1, 3 * self.hidden_size_per_attention_head)
        tokens = self.core_attention.tokens
        query, key, value = SplitHeads.apply(heads, heads.shape[0] // tokens * tokens)
        if isinstance(self.q_layernorm, FullWidthRMSNorm):
            query, key = normalise_together(query, key, self.q_layernorm, self.k_layernorm)
        elif isinstance(self.q_layernorm, HeadRMSNorm):
            query, key = self.q_layernorm(query), self.k_layernorm(key)
            value = normalised_heads(value, self.config.layernorm_epsilon) if self.norms_values else value
        return query, key, value


class VisionLayer(RegionLayer):
    """Core's transformer layer over the rows of a pack: [rows, 1, width] -> [rows, 1, width]."""

    whole = False
    """Whether, at native resolution, attention is not limited to windows."""

    drop_path = 0.0
    """Share of tiles that skip each of the two branches in training."""

    def configure(self, vision: VisionArchitecture, number: int) -> None:
        """Set what depends on the layer's index: windows and drop path."""
        native = vision.native
        self.self_attention.norms_values = vision.head_norms
        self.whole = native is not None and (native.window is None or number in native.full_layers)
        self.drop_path = vision.drop_path * number / max(vision.layers - 1, 1)

    def forward(self, hidden: Tensor, batch: Microbatch, view: Any = None) -> Tensor:
        """Map [rows, 1, width] to [rows, 1, width]; `view`: the pack's at native resolution (`native.View`)."""
        if self.training and self.drop_path:
            # Outside of what ranks draw for themselves: all rows of a tile go one way, on whatever ranks they are.
            self.self_attn_bda.kept, self.mlp_bda.kept = (self._kept(hidden, batch) for _ in range(2))
        with own_draws(self):
            return self.run(hidden, view and (view.whole if self.whole else view.windows))

    def _kept(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Draw the factors of this rank's rows of a branch, tile by tile: [rows, 1, 1]. If several ranks encode a pack,
        each draws for all of its tiles."""
        share, rows = 1 - self.drop_path, torch.arange(len(hidden), device=hidden.device)
        if self.config.sequence_parallel:
            rows += self.tp_group.rank() * len(hidden)
        images = Images.of(batch)
        chosen = torch.rand(len(images.encodes) or images.amount, device=hidden.device) < share
        if images.encodes:
            chosen = chosen.index_select(0, images.encoded_pieces)
        return (chosen.to(hidden.dtype) / share)[rows % images.amount, None, None]


def vision_layer_spec(config: TransformerConfig, architecture: VisionArchitecture, recompute: bool) -> ModuleSpec:
    """Return core's layer with bidirectional attention and, where the model has them, LayerScale or norms behind both
    branches, and norms of query and key.

    `recompute`: built so that its cheap outputs can be recomputed.
    """
    submodules = layer_submodules(config, recompute)
    if architecture.layer_scale:
        submodules.self_attn_bda = submodules.mlp_bda = ModuleSpec(
            LayerScaleAdd, params={"width": config.hidden_size, "initial": 1.0, "config": config}
        )
    if architecture.branch_norms:
        submodules.self_attn_bda = submodules.mlp_bda = ModuleSpec(BranchNormAdd, params={"config": config})
    submodules.mlp = partial(Perceptron.as_mlp_submodule, **submodules.mlp.keywords)
    attention, heads = submodules.self_attention, architecture.heads
    attention.module, attention.params = VisionAttention, {"attn_mask_type": AttnMaskType.no_mask}
    tiles = partial(TileAttention, tokens=architecture.tokens_per_tile)
    attention.submodules.core_attention = ImageAttention if architecture.native else tiles
    full_width = partial(FullWidthRMSNorm, heads=heads) if architecture.qk_norm else IdentityOp
    norm = HeadRMSNorm if architecture.norms_heads else full_width
    attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    set_projections(attention.submodules, config, heads, architecture.qkv_bias, recompute)
    return ModuleSpec(VisionLayer, submodules=submodules)
