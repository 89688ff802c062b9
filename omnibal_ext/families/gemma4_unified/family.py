"""Record of the family of Gemma 4 without towers: the text around an image is Gemma 4's."""

from omnibal_ext.families.family import Family, Model, Packs, Preset
from omnibal_ext.families.fields import GENERAL, LANGUAGE
from omnibal_ext.families.gemma4.family import IMAGES, IN_MEMORY, OTHERS, TEXT
from omnibal_ext.families.gemma4.presets import gemma_4_text
from omnibal_ext.families.gemma4_unified.config import read_gemma4_unified
from omnibal_ext.families.gemma4_unified.names import embedder_weights
from omnibal_ext.families.section import ModelType

MODEL = ModelType({"image_token_id": 258880, "tie_word_embeddings": True}, GENERAL | OTHERS, tuple(embedder_weights()))
WORDS = ModelType(
    {name: value for name, value in TEXT.defaults.items() if not name.endswith("_per_layer_input")}
    | {"sliding_window": 1024, "use_bidirectional_attention": "vision"},
    TEXT.without_effect,
    TEXT.weights,
)
PATCHES = ModelType(
    {
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "rms_norm_eps": 1e-6,
        "output_proj_dims": 3840,
    },
    LANGUAGE | {"num_soft_tokens"},  # of an image: the processor's file says so, and preprocessing
)
GEMMA_12B = {
    "model_type": "gemma4_unified",
    "vision_config": {"patch_size": 16},
    "text_config": gemma_4_text(48, 3840, 16, 8, 15360, num_global_key_value_heads=1),
}
"""Sizes that add up to the number of weights on the model's card."""
FAMILY = Family(
    models={"gemma4_unified": Model(MODEL, read_gemma4_unified, takes=IMAGES, packs=Packs("gemma4_unified", flash=()))},
    model_types={"gemma4_unified_text": WORDS, "gemma4_unified_vision": PATCHES},
    presets={"gemma-4-12b": Preset(GEMMA_12B)},
    folder_says_template=True,
    spellings=(
        IN_MEMORY,
        (r"^(model\.)?(embed_vision|vision_embedder)\.(?=patch_|pos_)", "vision_embedder."),
        (r"^(model\.)?embed_vision\.multimodal_embedder\.", "embed_vision."),
    ),
    idle=(r"embed_audio\.",),
)
