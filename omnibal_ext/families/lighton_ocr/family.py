"""Record of the family of LightOnOCR."""

from omnibal_ext.families.family import Family, Model, Packs, Preset
from omnibal_ext.families.fields import GENERAL, text, tower
from omnibal_ext.families.lighton_ocr.config import read_lighton_ocr
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.mistral3.names import merger_weights, pixtral_weights
from omnibal_ext.families.section import ModelType

VISION = tower(24, 1024, 16, 4096, model_type="pixtral", patch_size=14, hidden_act="silu")
LANGUAGE = text(
    28, 1024, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128, rms_norm_eps=1e-6, sliding_window=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
MODEL = ModelType(
    {"image_token_id": 151655, "tie_word_embeddings": True, "vision_config": VISION, "text_config": LANGUAGE},
    GENERAL,
    (*pixtral_weights(), *merger_weights()),
)
FAMILY = Family(
    models={
        "lighton_ocr": Model(
            MODEL,
            read_lighton_ocr,
            takes=("image_sizes",),
            packs=Packs("native_edge"),
            transformers="LightOnOcrForConditionalGeneration",
        )
    },
    classes={"LightOnOCRForConditionalGeneration": "lighton_ocr"},  # as published, of the type "mistral3"
    presets={"lighton-ocr-1b": Preset({"model_type": "lighton_ocr"})},
    markups=(ImageMarkup("lighton_ocr", "<|image_pad|>", ("<|image_pad|>",), gap=""),),
    folder_says_template=True,
    spellings=(
        (r"^model\.vision_encoder\.", "vision_tower."),
        (r"^model\.vision_projection\.", "multi_modal_projector."),
    ),
    modules=((r"^vision_tower\.", "vision_encoder."), (r"^multi_modal_projector\.", "vision_projection.")),
)
