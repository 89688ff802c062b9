"""Qwen2.5-Omni and Qwen3-Omni: their thinkers.

Talker and vocoder are not run; their weights are kept for export.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from omnibal_ext.families.family import Family, Model, Packs, Preset
from omnibal_ext.families.fields import GENERAL, LANGUAGE, names, text
from omnibal_ext.families.markup import FurtherMarkup, ImageMarkup
from omnibal_ext.families.qwen_omni.audio import OVER_BOTH, OVER_TIME, over_both, over_time
from omnibal_ext.families.qwen_omni.config import read_thinker, read_whole
from omnibal_ext.families.qwen_vl.config import Generation
from omnibal_ext.families.qwen_vl.family import QWEN, TEXT, TOWER_2_5, TOWER_3, WEIGHTS_3
from omnibal_ext.families.qwen_vl.names import qwen2_weights
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.languages import DENSE, LLAMA_WEIGHTS, ROUTERS, WINDOWS
from omnibal_ext.families.towers.llama import Llama, read_llama
from omnibal_ext.families.towers.rotation import Rotation
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, qwen
from omnibal_ext.families.weights import Weight, llama_of_experts
from omnibal_ext.modalities.modality import AUDIO

HEARD = names(
    """
    audio_end_token_id audio_start_token_id ignore_index init_std user_token_id video_token_id video_token_index
    vision_end_token_id vision_start_token_id vision_token_id
    """
)
SPOKEN = names(
    """
    assistant_token_id code2wav_config enable_audio_output enable_talker im_end_token_id im_start_token_id
    system_token_id talker_config token2wav_config tts_bos_token_id tts_eos_token_id tts_pad_token_id user_token_id
    """
)
SEEN = names("apply_vit_abs_pos_embed embed_dim image_size init_std tokens_per_second")
READ = names("init_std use_qk_norm")
"""Fields of published files that transformers' code does not read, like those above."""
TEXT_2_5 = text(
    28, 3584, 28, 4, 18944, 152064, hidden_act="silu", rms_norm_eps=1e-6, use_sliding_window=False, max_window_layers=28
)
TEXT_3 = ROUTERS | text(
    28, 2048, 28, 4, 18944, 3584, hidden_act="silu", rms_norm_eps=1e-6, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip
TOWER = {name: value for name, value in TOWER_2_5.items() if name != "tokens_per_second"}
MERGERS = {
    "deepstack_merger_list": "merger_list", ".norm.": ".ln_q.", ".linear_fc1.": ".mlp.0.", ".linear_fc2.": ".mlp.2.",
}  # fmt: skip
"""Parts of names of Qwen3-VL's mergers -> Qwen3-Omni's."""


def _apart(weights: Iterable[Weight]) -> Iterator[Weight]:
    """Yield Qwen2.5-VL's names of weights, but with the ViT's query, key and value as a tensor each."""
    for weight in weights:
        three = tuple(weight.theirs[0].replace(".qkv.", f".{one}.") for one in "qkv")
        yield replace(weight, theirs=three, form="vision_qkv") if len(set(three)) == len(three) else weight


def _renamed(weights: Iterable[Weight]) -> Iterator[Weight]:
    """Yield Qwen3-VL's names of weights as Qwen3-Omni has them."""
    for weight in weights:
        (name,) = weight.theirs
        for theirs, ours in MERGERS.items() if weight.kind == "projector" else ():
            name = name.replace(theirs, ours)
        yield replace(weight, theirs=(name,))


def _models(stem: str, prefix: str, code: Generation, fields: ModelType) -> dict[str, Model]:
    """Return models by type: whole (`stem`), and thinkers alone; `prefix`: of transformers' names of classes."""
    alone = Model(
        fields,
        partial(read_thinker, code=code),
        takes=("image_grid_thw", "position_ids", "input_features"),
        packs=Packs("native", chunks=code.windows),
        transformers=f"{prefix}ThinkerForConditionalGeneration",
    )
    whole = replace(fields, defaults={}, without_effect=GENERAL | SPOKEN)
    return {
        stem: replace(alone, model_type=whole, read=partial(read_whole, code=code), inside="thinker."),
        f"{stem}_thinker": alone,
    }


def _preset(kind: str, vision: dict[str, Any], words: dict[str, Any], **fields: Any) -> Preset:
    vision = {**vision, "out_hidden_size": words["hidden_size"]}
    audio = {"output_dim": words["hidden_size"]}
    return Preset(
        {
            "model_type": f"{kind}_thinker",
            "vision_config": vision,
            "audio_config": audio,
            "text_config": words,
            **fields,
        }
    )


THINKER = {"tie_word_embeddings": False, "position_id_per_seconds": 25}
THINKER_2_5 = ModelType(
    {**THINKER, "seconds_per_chunk": 2, "image_token_index": 151655, "audio_token_index": 151646},
    GENERAL | HEARD,
    (*over_time(), *_apart(qwen2_weights(later=True))),
)
THINKER_3 = ModelType(
    {**THINKER, "image_token_id": 151655, "audio_token_id": 151646},
    GENERAL | HEARD | {"seconds_per_chunk"},
    (*over_both(), *_renamed(WEIGHTS_3)),
)
READ_3 = partial(
    read_llama, code=Llama(Rotation(1e6, sections=(24, 20, 20), interleaved=True), qk_norm=True, experts=True)
)
MARKUP = ImageMarkup(
    "qwen2.5-omni",
    "<|IMAGE|>",
    ("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    before="<|vision_bos|>",
    after="<|vision_eos|>",
    gap="",
    video="<|VIDEO|>",
    further=(FurtherMarkup(AUDIO, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),),
)
CODE_2_5 = Generation("qwen-vl", TEXT, MARKUP.name, learned=False, windows=True)
CODE_3 = Generation("qwen3-vl", READ_3, "qwen3-omni", featured=True)
SOUND = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
MARKUP_3 = replace(QWEN, name="qwen3-omni", tokens=(*QWEN.tokens, *SOUND), further=(FurtherMarkup(AUDIO, *SOUND),))
FAMILY = Family(
    models={
        **_models("qwen2_5_omni", "Qwen2_5Omni", CODE_2_5, THINKER_2_5),
        **_models("qwen3_omni_moe", "Qwen3OmniMoe", CODE_3, THINKER_3),
    },
    model_types={
        "qwen2_5_omni_thinker": THINKER_2_5,
        "qwen2_5_omni_text": ModelType(TEXT_2_5, LANGUAGE | WINDOWS | READ, LLAMA_WEIGHTS),
        "qwen2_5_omni_audio_encoder": OVER_TIME,
        "qwen2_5_omni_vision_encoder": ModelType(TOWER, GENERAL | SEEN),
        "qwen3_omni_moe_thinker": THINKER_3,
        "qwen3_omni_moe_text": ModelType(
            TEXT_3,
            LANGUAGE | {"sliding_window"} | DENSE | READ,
            tuple(llama_of_experts(apart=False)),
            weights_apart=tuple(llama_of_experts(apart=True)),
        ),
        "qwen3_omni_moe_audio_encoder": OVER_BOTH,
        "qwen3_omni_moe_vision_encoder": ModelType(TOWER_3, GENERAL | SEEN),
    },
    presets={
        "qwen2.5-omni-3b": _preset("qwen2_5_omni", {"hidden_size": 1280}, qwen(36, 2048, 16, 2, 11008, 151936)),
        "qwen2.5-omni-7b": _preset("qwen2_5_omni", {"hidden_size": 1280}, qwen(28, 3584, 28, 4, 18944, 152064)),
        "qwen3-omni-30b-a3b": _preset(
            "qwen3_omni_moe",
            {},
            {**LANGUAGE_MODELS["qwen3-30b-a3b"], "rope_theta": 1e6, "vocab_size": 152064},
            audio_token_id=151675,
            position_id_per_seconds=13,
        ),
    },
    markups=(MARKUP, MARKUP_3),
    folder_says_template=True,
    spellings=(
        (r"^thinker\.model\.language_model\.", "language_model.model."),
        (r"^thinker\.(model|lm_head)\.", r"language_model.\1."),
        (r"^(language_model\.model|thinker|model)\.(?=audio_tower\.|visual\.)", ""),
    ),
    kept=("spk_dict.pt",),  # the talker's voices
    idle=(r"audio_tower\.audio_bos_eos_token\.", r"talker\.", r"token2wav\.", r"code2wav\."),
)  # fmt: skip
