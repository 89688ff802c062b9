"""Record of the family of Gemma 4."""

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, LANGUAGE, names, text, tower
from omnibal_ext.families.gemma4.config import read_gemma4
from omnibal_ext.families.gemma4.names import language_weights, vision_weights
from omnibal_ext.families.gemma4.presets import PRESETS
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import ModelType

OTHERS = names(
    """
    audio_config boi_token_id eoi_token_id video_token_id boa_token_id eoa_token_id eoa_token_index audio_token_id
    vision_soft_tokens_per_image
    """
)  # of sounds and films, of what stands around an image, and how many tokens the processor gives it
MODEL = ModelType({"image_token_id": 258880, "tie_word_embeddings": True}, GENERAL | OTHERS, tuple(vision_weights()))
TEXT = ModelType(
    text(
        30, 2304, 8, 4, 9216, 262144, head_dim=256, sliding_window=512, hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144, pad_token_id=0, attention_k_eq_v=False, rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
    ),
    LANGUAGE,
    tuple(language_weights()),
)  # fmt: skip
TOWER = ModelType(
    tower(
        16, 768, 12, 3072, num_key_value_heads=12, head_dim=64, pooling_kernel_size=3, patch_size=16,
        position_embedding_size=10240, standardize=False, use_clipped_linears=False, rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
    ),
    LANGUAGE | {"default_output_length", "global_head_dim"},  # its class has neither
)  # fmt: skip
IN_MEMORY = (r"^model\.(?=embed_vision\.|embed_audio\.|audio_tower\.)", "")
"""One of `spellings`: from transformers' names in memory to those of the tables."""
IMAGES = ("image_position_ids", "mm_token_type_ids")
"""Image inputs of transformers' models."""
FAMILY = Family(
    models={"gemma4": Model(MODEL, read_gemma4, takes=IMAGES, packs=Packs("gemma4", flash=()))},
    model_types={"gemma4_text": TEXT, "gemma4_vision": TOWER},
    presets=PRESETS,
    markups=(
        ImageMarkup(
            "gemma4", "<|image|>", ("<|image>", "<image|>", "<|image|>"), before="<|image>", after="<image|>", gap=""
        ),
    ),
    folder_says_template=True,
    spellings=(IN_MEMORY,),
    # Keys and values that published files have for layers which take those of others.
    idle=(r"embed_audio\.", r"audio_tower\.", r"language_model\.model\.layers\.\d+\.self_attn\.(k|v)_(proj|norm)\."),
)
