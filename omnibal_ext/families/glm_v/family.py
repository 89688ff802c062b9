"""Record of the family of GLM-V: dense models and mixtures of experts."""

from dataclasses import replace
from typing import Any

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, LANGUAGE, names, text
from omnibal_ext.families.glm_v.config import read_glm
from omnibal_ext.families.glm_v.names import dense_weights, mixture_weights, vision_weights
from omnibal_ext.families.glm_v.presets import PRESETS
from omnibal_ext.families.markup import ImageMarkup, Steps
from omnibal_ext.families.section import ModelType

MARKS = names(
    """
    image_token_id video_token_id image_start_token_id image_end_token_id video_start_token_id video_end_token_id
    """
)
TOWER: dict[str, Any] = {
    "depth": 24, "hidden_size": 1536, "hidden_act": "silu", "attention_bias": False, "num_heads": 12, "image_size": 336,
    "patch_size": 14, "rms_norm_eps": 1e-5, "temporal_patch_size": 2, "out_hidden_size": 4096,
    "intermediate_size": 13696,
}  # fmt: skip
TEXT = text(40, 4096, 32, 2, 13696, 151552, hidden_act="silu", rms_norm_eps=1e-5)
_TEXT_MOE = TEXT | text(
    46, 4096, 96, 8, 10944, 151424, attention_bias=True, moe_intermediate_size=1408, num_experts_per_tok=8,
    n_shared_experts=1, n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1,
    first_k_dense_replace=1, norm_topk_prob=True, router_aux_loss_coef=0.0001,
)  # fmt: skip
VISION_WEIGHTS = tuple(vision_weights())
IMAGES = ("image_grid_thw", "mm_token_type_ids")
"""Image inputs of transformers' models."""
PACKS = Packs("native_grown", videos_as_images=True)


def _model(image_token: int, packs: Packs = PACKS) -> Model:
    model_type = ModelType(
        {"image_token_id": image_token, "tie_word_embeddings": False}, GENERAL | MARKS, VISION_WEIGHTS
    )
    return Model(model_type, read_glm, takes=IMAGES, packs=packs)


# Its layers hand flash-attention positions in time, row and column.
_MOE = replace(PACKS, flash=("vision_config",))
_MARKUP = ImageMarkup(
    "glm-4.1v",
    "<|image|>",
    ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
    before="<|begin_of_image|>",
    after="<|end_of_image|>",
    gap="",
    video="<|image|>",
    steps=Steps("<|begin_of_video|>", "<|end_of_video|>", lambda time: str(int(time)), behind=True),
)
_LATER = Steps("<|begin_of_video|>", "<|end_of_video|>", lambda time: f"{time:.1f} seconds", behind=True)
FAMILY = Family(
    models={"glm4v": _model(151343), "glm46v": _model(151343), "glm4v_moe": _model(151363, _MOE)},
    model_types={
        # Query, key and value have biases whatever config.json says.
        "glm4v_text": ModelType(TEXT, LANGUAGE | MARKS | {"attention_bias"}, tuple(dense_weights())),
        "glm4v_vision": ModelType(TOWER, GENERAL),
        "glm4v_moe_text": ModelType(
            _TEXT_MOE,
            LANGUAGE | MARKS | {"output_router_logits"},
            tuple(mixture_weights(apart=False)),
            tuple(mixture_weights(apart=True)),
        ),
        "glm4v_moe_vision": ModelType(TOWER, GENERAL),
    },
    presets=PRESETS,
    markups=(_MARKUP, replace(_MARKUP, name="glm-4.6v", steps=_LATER)),
    folder_says_template=True,
)
