"""Record of the family of InternVL."""

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import DATA, GENERAL, names, tower
from omnibal_ext.families.internvl.config import read_internvl, read_original
from omnibal_ext.families.internvl.names import internvl_weights, original_weights
from omnibal_ext.families.internvl.presets import PRESETS
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import ModelType

_EXPERTS = names(  # of a ViT with experts, which `use_moe` turns on
    """
    capacity_factor ep_size eval_capacity_factor laux_allreduce moe_coeff_ratio moe_intermediate_size moe_output_scale
    noisy_gate_policy num_experts num_routed_experts num_shared_experts shared_expert_intermediate_size use_residual
    use_rts use_weighted_residual
    """
)
INTERNVL = ModelType(
    {
        "image_token_id": 151667,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    GENERAL | DATA,
    tuple(internvl_weights()),
)
VISION = ModelType(
    tower(
        24, 1024, 16, 4096, image_size=[448, 448], patch_size=[14, 14], hidden_act="gelu", layer_norm_eps=1e-6,
        norm_type="layer_norm", attention_bias=False, use_qk_norm=False, use_mean_pooling=True,
        use_absolute_position_embeddings=True, use_mask_token=False,
    ),
    GENERAL | {"layer_scale_init_value", "use_mean_pooling"},  # read where the last norm is
)  # fmt: skip
ORIGINAL = ModelType(
    {"downsample_ratio": 0.5, "select_layer": -1, "ps_version": "v1"},
    GENERAL | DATA | {"hidden_size"},  # repeated from below
    tuple(original_weights()),
)
ORIGINAL_VISION = ModelType(
    tower(
        48, 3200, 25, 12800, image_size=224, patch_size=14, hidden_act="gelu", layer_norm_eps=1e-6,
        norm_type="rms_norm", qkv_bias=False, qk_normalization=True,
    ),
    GENERAL | _EXPERTS,
)  # fmt: skip
FAMILY = Family(
    models={
        "internvl": Model(INTERNVL, read_internvl, packs=Packs("internvl", boundaries=True)),
        "internvl_chat": Model(ORIGINAL, read_original, transformers=""),
    },
    model_types={"internvl_vision": VISION, "intern_vit_6b": ORIGINAL_VISION},
    presets=PRESETS,
    markups=(
        ImageMarkup(
            "internvl",
            "<IMG_CONTEXT>",
            ("<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
            before="<img>",
            after="</img>",
        ),
    ),
    idle=(
        r"vision_tower\.layernorm\.",
        r"vision_model\.embeddings\.position_ids$",
    ),
)
