"""The ViT's links of the chain: patch embedding and vision layers."""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import dropout

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.attention import IsolatedAttention
from megatron.vlm.models.norm import FullWidthRMSNorm, build_norm
from megatron.vlm.models.padding import AttentionOutput, QueryKeyValue
from omnibal_ext.architectures.architecture import VisionArchitecture


class PatchEmbed(MegatronModule):
    """Tiles to ViT tokens: patches, a class token in front, learned positions, and CLIP's norm.

    pixels [tiles, 3, size, size] -> [1 + patches, tiles, width], core's order.
    """

    def __init__(self, config: TransformerConfig, architecture: VisionArchitecture) -> None:
        super().__init__(config)
        width, patch = architecture.hidden_size, architecture.patch_size
        self.projection = torch.nn.Conv2d(
            3, width, patch, stride=patch, bias=architecture.patch_bias, dtype=config.params_dtype
        )
        self.class_token = torch.nn.Parameter(torch.empty(1, 1, width, dtype=config.params_dtype))
        self.positions = torch.nn.Parameter(
            torch.empty(architecture.tokens_per_tile, 1, width, dtype=config.params_dtype)
        )
        epsilon = architecture.norm_epsilon
        self.norm = build_norm(config, width, epsilon, "LayerNorm") if architecture.pre_norm else torch.nn.Identity()
        for weight in (self.projection.weight, self.class_token, self.positions):
            config.init_method(weight.data)
        if self.projection.bias is not None:
            torch.nn.init.zeros_(self.projection.bias)

    def forward(self, hidden: None, batch: Microbatch) -> Tensor:
        """Pixels of the pack [tiles, 3, height, width] -> ViT tokens [tokens, tiles, width]."""
        assert batch.pixels is not None
        patches = self.projection(batch.pixels.to(self.class_token.dtype)).flatten(2).permute(2, 0, 1)
        class_tokens = self.class_token.expand(1, patches.shape[1], -1)
        return self.norm(torch.cat([class_tokens, patches]) + self.positions)


class LayerScaleAdd(torch.nn.Module):
    """The residual connection of a vision layer: residual + dropout(scale * (x + bias)).

    Takes the place of core's bias-dropout-add, whose calling order it keeps: called with (training, fused) it gives the
    function that adds.
    """

    def __init__(self, width: int, initial: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((width,), initial, dtype=dtype))

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """What core calls with (x, bias), residual and probability; never fused."""
        return partial(self._add, training)

    def _add(
        self, training: bool, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        x, bias = x_with_bias
        x = x if bias is None else x + bias
        return residual + dropout(x * self.scale, probability, training)


class VisionLayer(TransformerLayer):
    """Core's transformer layer over tiles: [tokens, tiles, width] -> the same."""

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """[tokens, tiles, width] -> the same."""
        return super().forward(hidden, attention_mask=None)[0]


def vision_layer_spec(config: TransformerConfig, architecture: VisionArchitecture) -> ModuleSpec:
    """Core's layer with bidirectional attention and, where the model has them, LayerScale and full-width QK-norm."""
    submodules = get_gpt_layer_local_submodules(normalization=config.normalization)
    submodules.input_layernorm = submodules.pre_mlp_layernorm = build_norm
    submodules.sharded_state_dict_keys_map = {}  # weights keep their names in checkpoints
    if architecture.layer_scale:
        submodules.self_attn_bda = submodules.mlp_bda = ModuleSpec(
            LayerScaleAdd, params={"width": config.hidden_size, "initial": 1.0, "dtype": config.params_dtype}
        )
    attention, heads = submodules.self_attention, architecture.heads
    attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    attention.submodules.core_attention = IsolatedAttention
    norm = partial(FullWidthRMSNorm, heads=heads) if architecture.qk_norm else IdentityOp
    attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    attention.submodules.linear_qkv = partial(QueryKeyValue, heads=heads, has_bias=architecture.qkv_bias)
    attention.submodules.linear_proj = partial(AttentionOutput, heads=heads)
    return ModuleSpec(VisionLayer, submodules=submodules)
