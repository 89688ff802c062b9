"""DeepSeek-VL."""

from omnibal_ext.families.deepseek_vl.config import read_deepseek_vl
from omnibal_ext.families.deepseek_vl.presets import PRESETS
from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import Part
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import linear

MODEL = Part(
    {"image_token_id": 100015, "tie_word_embeddings": True},
    GENERAL,
    (
        *clip_weights(last_norm=True),
        *linear("projector", "linear_fc1", "aligner.linear1"),
        *linear("projector", "linear_fc2", "aligner.linear2"),
    ),
)
FAMILY = Family(
    models={"deepseek_vl": Model(MODEL, read_deepseek_vl, packs=Packs("letterbox"))},
    presets=PRESETS,
    markups=(ImageMarkup("deepseek-vl", "<image_placeholder>", ("<image_placeholder>",), gap=""),),
    spellings=(
        (r"^model\.vision_model\.", "vision_tower."),
        (r"^vision_tower\.vision_model\.", "vision_tower."),  # of files that transformers 4 wrote
        (r"^model\.aligner\.", "aligner."),
    ),
    modules=((r"^vision_tower\.", "vision_model."),),
)
