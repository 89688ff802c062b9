"""Record of the family of Gemma 3."""

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, LANGUAGE, text
from omnibal_ext.families.gemma3.config import read_gemma3
from omnibal_ext.families.gemma3.presets import PRESETS
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import Weight, llama

MODEL = ModelType(
    {"mm_tokens_per_image": 256, "image_token_index": 262144, "tie_word_embeddings": True},
    GENERAL | {"boi_token_index", "eoi_token_index"},
    (
        *clip_weights(last_norm=True),
        Weight("projector", "norm.weight", ("multi_modal_projector.mm_soft_emb_norm.weight",)),
        Weight("projector", "linear.weight", ("multi_modal_projector.mm_input_projection_weight",), "transposed"),
    ),
)
TEXT = ModelType(
    text(
        26, 2304, 8, 4, 9216, 262208, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096, rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
    ),
    LANGUAGE | {"_sliding_window_pattern", "cache_implementation", "sliding_window"},  # of its writer; of generation;
    tuple(llama(branch_norms=True)),  # the window is read where it is used
)  # fmt: skip
FAMILY = Family(
    models={"gemma3": Model(MODEL, read_gemma3, takes=("token_type_ids",), packs=Packs("gemma", flash=()))},
    model_types={"gemma3_text": TEXT},
    presets=PRESETS,
    markups=(
        ImageMarkup(
            "gemma",
            "<image_soft_token>",
            ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
            gap="",
        ),
    ),
    folder_says_template=True,
)
