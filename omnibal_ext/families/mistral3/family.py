"""Record of the family of Mistral 3."""

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, tower
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.mistral3.config import read_mistral3
from omnibal_ext.families.mistral3.names import merger_weights, pixtral_weights
from omnibal_ext.families.mistral3.presets import PRESETS
from omnibal_ext.families.section import ModelType

MODEL = ModelType(
    {"image_token_index": 10, "multimodal_projector_bias": False, "tie_word_embeddings": True},
    GENERAL,
    (*pixtral_weights(), *merger_weights()),
)
PIXTRAL = ModelType(
    tower(24, 1024, 16, 4096, patch_size=16, hidden_act="gelu"),
    GENERAL | {"image_size", "vocab_size"},  # the longest edge is the processor's; of no table
)
FAMILY = Family(
    models={"mistral3": Model(MODEL, read_mistral3, takes=("image_sizes",), packs=Packs("native_edge"))},
    model_types={"pixtral": PIXTRAL},
    presets=PRESETS,
    markups=(
        ImageMarkup(
            "mistral", "[IMG]", ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), after="[IMG_END]", gap="", between="[IMG_BREAK]"
        ),
    ),
    folder_says_template=True,
)
