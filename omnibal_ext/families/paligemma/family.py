"""PaliGemma and PaliGemma 2."""

from typing import Any

from omnibal_ext.families.family import Family, Model
from omnibal_ext.families.fields import DATA, GENERAL, LANGUAGE, names
from omnibal_ext.families.markup import IMAGE_MARK, ImageMarkup
from omnibal_ext.families.paligemma.config import read_paligemma
from omnibal_ext.families.paligemma.presets import PRESETS
from omnibal_ext.families.section import Part
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import linear, llama

MODEL = Part(
    {"image_token_index": 256000, "projection_dim": 2048, "tie_word_embeddings": True},
    GENERAL | DATA | names("_vocab_size hidden_size vocab_size"),
    (*clip_weights(last_norm=True), *linear("projector", "linear", "multi_modal_projector.linear")),
)
_GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
_GEMMA2: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
WITHOUT_EFFECT = LANGUAGE | names("num_image_tokens use_bidirectional_attention")  # where a mask is given
FAMILY = Family(
    models={"paligemma": Model(MODEL, read_paligemma)},
    parts={
        "gemma": Part(_GEMMA, WITHOUT_EFFECT, tuple(llama())),
        "gemma2": Part(
            _GEMMA2, WITHOUT_EFFECT | names("cache_implementation sliding_window"), tuple(llama(branch_norms=True))
        ),  # the window is read where it is used
    },
    presets=PRESETS,
    markups=(ImageMarkup("paligemma", IMAGE_MARK, (IMAGE_MARK,), gap=""),),
)
