"""LightOnOCR."""

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL
from omnibal_ext.families.lighton_ocr.config import read_lighton_ocr
from omnibal_ext.families.lighton_ocr.presets import PRESETS
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.mistral3.names import merger_weights, pixtral_weights
from omnibal_ext.families.section import Part

VISION = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14, "hidden_act": "silu",
}  # fmt: skip
LANGUAGE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "vocab_size": 151936, "sliding_window": None,
}  # fmt: skip
MODEL = Part(
    {"image_token_id": 151655, "tie_word_embeddings": True, "vision_config": VISION, "text_config": LANGUAGE},
    GENERAL,
    (*pixtral_weights(), *merger_weights()),
)
FAMILY = Family(
    models={"lighton_ocr": Model(MODEL, read_lighton_ocr, takes=("image_sizes",), packs=Packs("native_edge"))},
    presets=PRESETS,
    markups=(ImageMarkup("lighton_ocr", "<|image_pad|>", ("<|image_pad|>",), gap=""),),
    folder_says_template=True,
    spellings=(
        (r"^model\.vision_encoder\.", "vision_tower."),
        (r"^model\.vision_projection\.", "multi_modal_projector."),
    ),
    modules=((r"^vision_tower\.", "vision_encoder."), (r"^multi_modal_projector\.", "vision_projection.")),
)
