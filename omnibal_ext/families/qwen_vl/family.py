"""Record of the family of Qwen-VL, second and third generation."""

from dataclasses import replace
from functools import partial
from typing import Any

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, LANGUAGE, names, text
from omnibal_ext.families.markup import ImageMarkup, Steps
from omnibal_ext.families.qwen_vl.config import Generation, read_qwen
from omnibal_ext.families.qwen_vl.names import qwen2_weights, qwen3_weights
from omnibal_ext.families.qwen_vl.presets import PRESETS
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.languages import DENSE, LLAMA_WEIGHTS, ROUTERS, WINDOWS
from omnibal_ext.families.towers.llama import Llama, read_llama
from omnibal_ext.families.towers.rotation import Rotation
from omnibal_ext.families.weights import Weight, llama_of_experts

_TEXT = text(80, 8192, 64, 8, 29568, 152064, hidden_act="silu", rms_norm_eps=1e-5, use_sliding_window=False)
_TOWER: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWER_2_5: dict[str, Any] = {
    **_TOWER,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 4,
}
_TEXT_3 = text(32, 4096, 32, 32, 22016, 151936, hidden_act="silu", head_dim=128, rms_norm_eps=1e-6)
TOWER_3: dict[str, Any] = {
    **_TOWER,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_TEXT_3_MOE = ROUTERS | text(
    24, 2048, 16, 16, 5632, 151936, hidden_act="silu", rms_norm_eps=1e-6, moe_intermediate_size=1408,
    num_local_experts=60, num_experts_per_tok=4,
)  # fmt: skip
MARKS = names("image_token_id vision_start_token_id vision_end_token_id vision_token_id video_token_id")
_LANGUAGE = LANGUAGE | WINDOWS | MARKS
ROTATION = Rotation(1e6, sections=(16, 24, 24))
ROTATION_3 = Rotation(5e5, sections=(24, 20, 20), interleaved=True)
TEXT = partial(read_llama, code=Llama(ROTATION, qkv_bias=True))
TEXT_3 = partial(read_llama, code=Llama(ROTATION_3, qk_norm=True))
TEXT_3_MOE = partial(read_llama, code=Llama(ROTATION_3, qk_norm=True, experts=True, renormalised=True))
WEIGHTS_3 = tuple(qwen3_weights())
IMAGES = ("image_grid_thw", "mm_token_type_ids")
"""Image inputs of transformers' models."""


def _model(weights: tuple[Weight, ...], code: Generation) -> Model:
    model_type = ModelType({"image_token_id": 151655, "tie_word_embeddings": False}, GENERAL | MARKS, weights)
    return Model(model_type, partial(read_qwen, code=code), takes=IMAGES, packs=Packs("native"))


QWEN = ImageMarkup(
    "qwen-vl",
    "<|image_pad|>",
    ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    before="<|vision_start|>",
    after="<|vision_end|>",
    gap="",
    video="<|video_pad|>",
)
_STEPS = Steps("<|vision_start|>", "<|vision_end|>", lambda time: f"<{time:.1f} seconds>")
FAMILY = Family(
    models={
        "qwen2_vl": _model(tuple(qwen2_weights(later=False)), Generation("qwen-vl", TEXT, "qwen-vl", learned=False)),
        "qwen2_5_vl": _model(
            tuple(qwen2_weights(later=True)), Generation("qwen2.5-vl", TEXT, "qwen-vl", learned=False, windows=True)
        ),
        "qwen3_vl": _model(WEIGHTS_3, Generation("qwen3-vl", TEXT_3, featured=True)),
        "qwen3_vl_moe": _model(WEIGHTS_3, Generation("qwen3-vl", TEXT_3_MOE, featured=True)),
    },
    model_types={
        "qwen2_vl_text": ModelType({**_TEXT, "max_window_layers": 80}, _LANGUAGE, LLAMA_WEIGHTS),
        "qwen2_vl_vision": ModelType(
            {**_TOWER, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4}, GENERAL
        ),
        "qwen2_5_vl_text": ModelType({**_TEXT, "max_window_layers": 80}, _LANGUAGE, LLAMA_WEIGHTS),
        "qwen2_5_vl_vision": ModelType(TOWER_2_5, GENERAL),
        "qwen3_vl_text": ModelType(_TEXT_3, _LANGUAGE, LLAMA_WEIGHTS),
        "qwen3_vl_vision": ModelType(TOWER_3, GENERAL),
        "qwen3_vl_moe_text": ModelType(
            _TEXT_3_MOE, LANGUAGE | {"sliding_window"} | DENSE | MARKS, tuple(llama_of_experts(apart=False))
        ),
        "qwen3_vl_moe_vision": ModelType(TOWER_3, GENERAL),
    },
    presets=PRESETS,
    markups=(QWEN, replace(QWEN, name="qwen3-vl", steps=_STEPS)),
    folder_says_template=True,
)
