"""Record of the family of LLaVA."""

from typing import Any

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import DATA, GENERAL, names
from omnibal_ext.families.llava.config import read_llava, read_onevision, read_vip_llava
from omnibal_ext.families.llava.presets import PRESETS
from omnibal_ext.families.markup import IMAGE_MARK, ImageMarkup
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import Weight, linear, norm

_FIELDS: dict[str, Any] = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
_VIP = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": [-2, -5, -8, -11, 6],
    "tie_word_embeddings": False,
}
_ONEVISION = {
    **_FIELDS,
    "image_token_index": 151646,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
}
WITHOUT_EFFECT = GENERAL | DATA | {"vocab_size"}
WEIGHTS = (
    *clip_weights(),
    *linear("projector", "linear_fc1", "multi_modal_projector.linear_1", when="projector_bias"),
    *linear("projector", "linear_fc2", "multi_modal_projector.linear_2", when="projector_bias"),
    *norm("projector", "norm", "multi_modal_projector.projector_layernorm", when="projector_norm"),
    Weight("word_embed", "newline", ("image_newline",), "row", when="newline"),
)
FAMILY = Family(
    models={
        "llava": Model(ModelType(_FIELDS, WITHOUT_EFFECT, WEIGHTS), read_llava, packs=Packs("pad")),
        "llava_next": Model(
            ModelType({**_FIELDS, "image_grid_pinpoints": None}, WITHOUT_EFFECT, WEIGHTS),
            read_llava,
            takes=("image_sizes",),
            packs=Packs("anyres"),
        ),
        "llava_next_video": Model(
            ModelType(
                {**_FIELDS, "image_token_index": 32001, "image_grid_pinpoints": None},
                WITHOUT_EFFECT
                | names(
                    "spatial_pool_mode spatial_pool_out_channels spatial_pool_stride video_seq_length video_token_index"
                ),
                WEIGHTS,
            ),
            read_llava,
            takes=("image_sizes",),
            packs=Packs("anyres"),
        ),
        "vipllava": Model(ModelType(_VIP, WITHOUT_EFFECT, WEIGHTS), read_vip_llava, packs=Packs("pad")),
        "llava_onevision": Model(
            ModelType(_ONEVISION, WITHOUT_EFFECT | {"video_token_index"}, WEIGHTS),
            read_onevision,
            takes=("image_sizes", "batch_num_images"),
            packs=Packs("anyres_max_9", boundaries=True),
        ),
    },
    presets=PRESETS,
    markups=(ImageMarkup("llava", IMAGE_MARK, (IMAGE_MARK,), first=True),),
)
