"""Record of the family of PaliGemma and PaliGemma 2."""

from omnibal_ext.families.family import Family, Model
from omnibal_ext.families.fields import DATA, GENERAL, LANGUAGE, names, text
from omnibal_ext.families.markup import IMAGE_MARK, ImageMarkup
from omnibal_ext.families.paligemma.config import read_paligemma
from omnibal_ext.families.paligemma.presets import PRESETS
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import linear, llama

MODEL = ModelType(
    {"image_token_index": 256000, "projection_dim": 2048, "tie_word_embeddings": True},
    GENERAL | DATA | names("_vocab_size hidden_size vocab_size"),
    (*clip_weights(last_norm=True), *linear("projector", "linear", "multi_modal_projector.linear")),
)
_GEMMA = text(28, 3072, 16, 16, 24576, 256000, head_dim=256, hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-6)
_GEMMA2 = text(
    26, 2304, 8, 4, 9216, 256000, head_dim=256, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
    query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
)  # fmt: skip
WITHOUT_EFFECT = LANGUAGE | names("num_image_tokens use_bidirectional_attention")  # where a mask is given
FAMILY = Family(
    models={"paligemma": Model(MODEL, read_paligemma)},
    model_types={
        "gemma": ModelType(_GEMMA, WITHOUT_EFFECT, tuple(llama())),
        "gemma2": ModelType(
            _GEMMA2, WITHOUT_EFFECT | names("cache_implementation sliding_window"), tuple(llama(branch_norms=True))
        ),  # the window is read where it is used
    },
    presets=PRESETS,
    markups=(ImageMarkup("paligemma", IMAGE_MARK, (IMAGE_MARK,), gap=""),),
)
