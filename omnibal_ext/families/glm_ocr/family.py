"""Record of the family of GLM-OCR."""

from omnibal_ext.families.family import Family, Model, Preset
from omnibal_ext.families.fields import GENERAL, LANGUAGE, text
from omnibal_ext.families.glm_ocr.config import read_glm_ocr
from omnibal_ext.families.glm_v.family import IMAGES, MARKS, PACKS, TEXT, TOWER, VISION_WEIGHTS
from omnibal_ext.families.glm_v.names import dense_weights
from omnibal_ext.families.section import ModelType

MODEL = ModelType({"image_token_id": 59280, "tie_word_embeddings": False}, GENERAL | MARKS, VISION_WEIGHTS)
OCR = text(16, 1536, 16, 8, 4608, 59392, head_dim=128, rope_parameters={"mrope_section": [16, 24, 24]})
FAMILY = Family(
    models={"glm_ocr": Model(MODEL, read_glm_ocr, takes=IMAGES, packs=PACKS)},
    model_types={
        "glm_ocr_text": ModelType(
            TEXT | text(16, 1024, 16, 8, 4096, 59392),
            LANGUAGE | MARKS,
            tuple(dense_weights()),
        ),
        "glm_ocr_vision": ModelType(
            {
                **TOWER, "hidden_size": 1024, "num_heads": 16, "attention_bias": True, "out_hidden_size": 1536,
                "intermediate_size": 4096,
            },
            GENERAL | {"image_size"},
        ),
    },
    presets={"glm-ocr": Preset({"model_type": "glm_ocr", "text_config": OCR})},  # from memory
    folder_says_template=True,
)  # fmt: skip
