"""Record of the family of Qwen3.5 and Qwen3.6."""

from functools import partial

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, LANGUAGE, names, text
from omnibal_ext.families.qwen3_5.config import read_linear_language
from omnibal_ext.families.qwen3_5.names import language_weights
from omnibal_ext.families.qwen3_5.presets import PRESETS
from omnibal_ext.families.qwen_vl.config import Generation, read_qwen
from omnibal_ext.families.qwen_vl.family import IMAGES, MARKS, TOWER_3, WEIGHTS_3
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.languages import DENSE

_TEXT = text(
    32, 4096, 16, 4, 12288, 248320, hidden_act="silu", head_dim=256, rms_norm_eps=1e-6, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
)  # fmt: skip
_TEXT_MOE = {
    **{name: value for name, value in _TEXT.items() if name != "intermediate_size"},
    "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001,
}  # fmt: skip
TOWER = ModelType({name: value for name, value in TOWER_3.items() if name != "deepstack_visual_indexes"}, GENERAL)
WITHOUT_EFFECT = LANGUAGE | DENSE | names("mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype")
"""Fields without effect; the last are of layers for generation."""
MODEL = Model(
    ModelType({"image_token_id": 248056, "tie_word_embeddings": False}, GENERAL | MARKS, WEIGHTS_3),
    partial(read_qwen, code=Generation("qwen3.5", read_linear_language)),
    takes=IMAGES,
    # Its ViT hands boundaries on to flash-attention in addition to its own.
    packs=Packs("native", boundaries=True, linear_attention=True, flash=("text_config",)),
)
FAMILY = Family(
    models={"qwen3_5": MODEL, "qwen3_5_moe": MODEL},
    model_types={
        "qwen3_5_text": ModelType(_TEXT, WITHOUT_EFFECT, tuple(language_weights(mixture=False))),
        "qwen3_5_vision": TOWER,
        "qwen3_5_moe_text": ModelType(
            _TEXT_MOE,
            WITHOUT_EFFECT,
            tuple(language_weights(mixture=True)),
            weights_apart=tuple(language_weights(mixture=True, apart=True)),
        ),
        "qwen3_5_moe_vision": TOWER,
    },
    presets=PRESETS,
    folder_says_template=True,
    idle=(r"mtp\.",),
)
