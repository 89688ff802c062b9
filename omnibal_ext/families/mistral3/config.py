"""Read the config.json of Mistral 3: Pixtral's ViT (arXiv 2410.07073) at native resolution, Mistral's layers."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.languages import read_language
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.families.towers.native import ACTIVATIONS, native_sizes, rotary_base
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture

NORM_EPSILON = 1e-5
"""Epsilon of every norm of the ViT, whatever config.json says."""


def read_mistral3(name: str, config: Section) -> Architecture:
    """Read a mistral3's config.json. Raises UserError naming an unsupported field."""
    config.must(projector_hidden_act="gelu", vision_feature_layer=-1, spatial_merge_size=2)
    tower, text = config.towers("pixtral", "mistral", "ministral3")
    return Architecture(
        name,
        read_pixtral(tower),
        read_language(text),
        merger="matrix",
        projector_bias=config.take("multimodal_projector_bias"),
        tied=tied(config),
        prompt=PromptFormat("mistral", config.take("image_token_index"), "mistral-v7", "native_edge"),
        types=("mistral3", text["model_type"]),
    )


def read_pixtral(tower: Section) -> VisionArchitecture:
    """Read the ViT of a section of type pixtral. Raises UserError naming an unsupported field."""
    tower.must(num_channels=3, attention_dropout=0.0)
    sizes = native_sizes(tower, "num_hidden_layers", heads="num_attention_heads")
    tower.must(head_dim=sizes["hidden_size"] // sizes["heads"])
    vision = VisionArchitecture(
        **sizes,
        ffn_hidden_size=tower.take("intermediate_size"),
        normalization="RMSNorm",
        norm_epsilon=NORM_EPSILON,
        qkv_bias=False,
        bias=False,
        activation=tower.choose("hidden_act", ACTIVATIONS),
        gated=True,
        patch_bias=False,
        pre_norm=True,
        pixels="clip",
        native=NativeResolution(frames=1, theta=rotary_base(tower), columns_between=True),
    )
    tower.refuse_unread()
    return vision
