"""Record of the family of DeepSeek-VL."""

from omnibal_ext.families.deepseek_vl.config import read_deepseek_vl
from omnibal_ext.families.family import Family, Model, Packs, Preset
from omnibal_ext.families.fields import GENERAL, text, tower
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import linear

MODEL = ModelType(
    {"image_token_id": 100015, "tie_word_embeddings": True},
    GENERAL,
    (
        *clip_weights(last_norm=True),
        *linear("projector", "linear_fc1", "aligner.linear1"),
        *linear("projector", "linear_fc2", "aligner.linear2"),
    ),
)
DEEPSEEK_1_3B = {
    "model_type": "deepseek_vl",
    "vision_config": tower(24, 1024, 16, 4096, image_size=384, hidden_act="gelu"),
    "text_config": text(24, 2048, 16, 16, 5504, 102400, rope_theta=1e6),
    "tie_word_embeddings": False,
}
"""Sizes of the language model are from memory of its published config.json."""
FAMILY = Family(
    models={"deepseek_vl": Model(MODEL, read_deepseek_vl, packs=Packs("letterbox"))},
    presets={"deepseek-vl-1.3b": Preset(DEEPSEEK_1_3B)},
    markups=(ImageMarkup("deepseek-vl", "<image_placeholder>", ("<image_placeholder>",), gap=""),),
    spellings=(
        (r"^model\.vision_model\.", "vision_tower."),
        (r"^vision_tower\.vision_model\.", "vision_tower."),  # of files that transformers 4 wrote
        (r"^model\.aligner\.", "aligner."),
    ),
    modules=((r"^vision_tower\.", "vision_model."),),
)
