"""The models we know, a line each, and how a name becomes a model.

Sources: the published configurations of InternViT, CLIP, SigLIP, InternLM2, Qwen, Llama, Mistral, Vicuna, Yi and Gemma.
Vocabularies are those of the vision-language model, with its image tokens, not of the language model it started from.
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path

from omnibal_ext.architectures.architecture import (
    Architecture,
    Experts,
    LanguageArchitecture,
    NativeResolution,
    PromptFormat,
    RopeScaling,
    SlidingWindow,
    VisionArchitecture,
)
from omnibal_ext.architectures.huggingface import find_config, read_architecture
from omnibal_ext.architectures.presets_qwen3_5 import QWEN3_5, qwen3_5
from omnibal_ext.errors import UserError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""OWNER/MODEL, as Hugging Face's hub has them."""
SIGLIP = VisionArchitecture(
    26, 1152, 16, 4304, image_size=384, activation="gelu_tanh", class_token=False, layer_scale=False, pixels="half"
)
"""SigLIP so400m, 26 of its 27 layers, as LLaVA-OneVision has it."""
VISION_TOWERS = {
    "internvit-6b": VisionArchitecture(45, 3200, 25, 12800, normalization="RMSNorm", qkv_bias=False, qk_norm=True),
    "internvit-300m": VisionArchitecture(24, 1024, 16, 4096),
    # 24 layers, the last of which LLaVA does not use.
    "clip-l-336": VisionArchitecture(
        23, 1024, 16, 4096, image_size=336, norm_epsilon=1e-5, activation="quick_gelu", patch_bias=False, pre_norm=True,
        layer_scale=False, pixels="clip",
    ),
    # EVA-CLIP (arXiv 2303.15389, 2402.04252), sizes only: what the planner needs.
    "eva-clip-1b": VisionArchitecture(40, 1408, 16, 6144),
    "eva-clip-4b": VisionArchitecture(64, 1792, 16, 15360),
    "eva-clip-8b": VisionArchitecture(32, 4096, 32, 20480),
    "eva-clip-18b": VisionArchitecture(48, 5120, 40, 25600),
}  # fmt: skip


def _qwen(
    layers: int, hidden_size: int, heads: int, kv_heads: int, ffn_hidden_size: int, vocab_size: int = 151674
) -> LanguageArchitecture:
    return LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, vocab_size, norm_epsilon=1e-6, qkv_bias=True
    )


def _qwen3(
    layers: int, hidden_size: int, heads: int, ffn_hidden_size: int, kv_heads: int = 8, experts: Experts | None = None
) -> LanguageArchitecture:
    return LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, vocab_size=151936, norm_epsilon=1e-6, qk_norm=True,
        head_size=None if hidden_size == 128 * heads else 128, experts=experts,
    )  # fmt: skip


LANGUAGE_MODELS = {
    "internlm2-1.8b": LanguageArchitecture(24, 2048, 16, 8, 8192, vocab_size=92553),
    "internlm2-7b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=92553),
    "internlm2-20b": LanguageArchitecture(48, 6144, 48, 8, 16384, vocab_size=92553),
    "qwen2-0.5b": _qwen(24, 896, 14, 2, 4864, vocab_size=151655),
    "qwen2.5-0.5b": _qwen(24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": _qwen(28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _qwen(36, 2048, 16, 2, 11008),
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 768, kv_heads=4, experts=Experts(128, 8)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 1536, kv_heads=4, experts=Experts(128, 8)),
    "qwen1.5-110b": LanguageArchitecture(80, 8192, 64, 8, 49152, 152064, norm_epsilon=1e-6, qkv_bias=True),
    "yi-34b": LanguageArchitecture(60, 7168, 56, 8, 20480, vocab_size=64064, rope_theta=5e6),
    "llama3-8b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=128320, rope_theta=5e5),
    "llama3-70b": LanguageArchitecture(80, 8192, 64, 8, 28672, vocab_size=128320, rope_theta=5e5),
    "mistral-7b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=32064, rope_theta=1e6),
    "vicuna-7b": LanguageArchitecture(32, 4096, 32, 32, 11008, vocab_size=32064, rope_theta=1e4),
    "vicuna-13b": LanguageArchitecture(40, 5120, 40, 40, 13824, vocab_size=32064, rope_theta=1e4),
}

# Name: ViT, language model, chat template.
INTERNVL = {
    "internvl-chat-1.5": ("internvit-6b", "internlm2-20b", "internlm2-chat"),
    "internvl-chat-1.5-plus": ("internvit-6b", "yi-34b", "hermes-2"),
    "internvl2-1b": ("internvit-300m", "qwen2-0.5b", "hermes-2"),
    "internvl2-2b": ("internvit-300m", "internlm2-1.8b", "internlm2-chat"),
    "internvl2-8b": ("internvit-300m", "internlm2-7b", "internlm2-chat"),
    "internvl2-26b": ("internvit-6b", "internlm2-20b", "internlm2-chat"),
    "internvl2-40b": ("internvit-6b", "yi-34b", "hermes-2"),
    "internvl2-76b": ("internvit-6b", "llama3-70b", "hermes-2-llama3"),
    "internvl2.5-1b": ("internvit-300m", "qwen2.5-0.5b", "hermes-2"),
    "internvl2.5-2b": ("internvit-300m", "internlm2-1.8b", "internlm2-chat"),
    "internvl2.5-4b": ("internvit-300m", "qwen2.5-3b", "hermes-2"),
    "internvl2.5-8b": ("internvit-300m", "internlm2-7b", "internlm2-chat"),
    "internvl2.5-26b": ("internvit-6b", "internlm2-20b", "internlm2-chat"),
    "internvl2.5-38b": ("internvit-6b", "qwen2.5-32b", "hermes-2"),
    "internvl2.5-78b": ("internvit-6b", "qwen2.5-72b", "hermes-2"),
    "internvl3-1b": ("internvit-300m", "qwen2.5-0.5b", "hermes-2"),
    "internvl3-2b": ("internvit-300m", "qwen2.5-1.5b", "hermes-2"),
    "internvl3-8b": ("internvit-300m", "qwen2.5-7b", "hermes-2"),
    "internvl3-14b": ("internvit-300m", "qwen2.5-14b", "hermes-2"),
    "internvl3-38b": ("internvit-6b", "qwen2.5-32b", "hermes-2"),
    "internvl3-78b": ("internvit-6b", "qwen2.5-72b", "hermes-2"),
    "internvl3.5-1b": ("internvit-300m", "qwen3-0.6b", "hermes-2"),
    "internvl3.5-2b": ("internvit-300m", "qwen3-1.7b", "hermes-2"),
    "internvl3.5-4b": ("internvit-300m", "qwen3-4b", "hermes-2"),
    "internvl3.5-8b": ("internvit-300m", "qwen3-8b", "hermes-2"),
    "internvl3.5-14b": ("internvit-300m", "qwen3-14b", "hermes-2"),
    "internvl3.5-38b": ("internvit-6b", "qwen3-32b", "hermes-2"),
    "internvl3.5-30b-a3b": ("internvit-300m", "qwen3-30b-a3b", "hermes-2"),
    "internvl3.5-241b-a28b": ("internvit-6b", "qwen3-235b-a22b", "hermes-2"),
}
# Name: language model, chat template, tiling.
LLAVA = {
    "llava-1.5-7b": ("vicuna-7b", "vicuna", "pad"),
    "llava-1.5-13b": ("vicuna-13b", "vicuna", "pad"),
    "llava-1.6-vicuna-7b": ("vicuna-7b", "vicuna", "anyres"),
    "llava-1.6-vicuna-13b": ("vicuna-13b", "vicuna", "anyres"),
    "llava-1.6-mistral-7b": ("mistral-7b", "mistral", "anyres"),
    "llava-1.6-llama3-8b": ("llama3-8b", "llava-llama3", "anyres"),
}
# Their words are those of the language model and three of its own, filled up to a multiple of 64.
ONEVISION = {
    "llava-onevision-0.5b": ("qwen2-0.5b", 152000, True),
    "llava-onevision-7b": ("qwen2.5-7b", 152128, False),
    "llava-onevision-72b": ("qwen2.5-72b", 152128, False),
}
# Where image features go: a token that the model's makers added, so its id follows from the vocabulary before it.
IMAGE_TOKEN_IDS = {
    "internvl": {"internlm2": 92546, "qwen2": 151648, "qwen2.5": 151667, "qwen3": 151671},
    "llava": {"vicuna": 32000, "mistral": 32000, "llama3": 128256, "yi": 64000},
}
MODEL_FLAGS = ("--model", "--preset")
"""Both words name a model to every program: what `preset` takes."""
TINY = Architecture(
    "tiny",
    VisionArchitecture(layers=4, hidden_size=64, heads=4, ffn_hidden_size=256, patch_size=8, image_size=32),
    LanguageArchitecture(
        layers=3, hidden_size=128, heads=4, kv_heads=2, ffn_hidden_size=352, vocab_size=512, rope_theta=1e4
    ),
)


def _assembled(name: str, vision: str, language: str, template: str | None = None, tiling: str = "") -> Architecture:
    """A ViT and a language model, with the projector and prompts that go with the ViT: CLIP's are LLaVA's."""
    llava = vision.startswith("clip")
    markup = "llava" if llava else "internvl"
    token = IMAGE_TOKEN_IDS[markup].get(language.split("-", 1)[0])
    tiling = tiling or ("pad" if llava else "internvl")
    return Architecture(
        name,
        VISION_TOWERS[vision],
        LANGUAGE_MODELS[language],
        shuffle=1 if llava else 2,
        projector_norm=not llava,
        newline=tiling == "anyres",
        prompt=PromptFormat(markup, token, template, tiling),
    )


def _onevision(name: str, language: str, words: int, tied: bool) -> Architecture:
    return Architecture(
        name,
        SIGLIP,
        replace(LANGUAGE_MODELS[language], vocab_size=words),
        shuffle=1,
        projector_norm=False,
        newline=True,
        tied=tied,
        prompt=PromptFormat("llava", 151646, "qwen-vl", "anyres_max_9"),
    )


def _qwen_vl(name: str, language: LanguageArchitecture, later_ffn: int, tied: bool) -> Architecture:
    """Qwen2.5-VL; or Qwen2-VL, without `later_ffn`, the width of the ViT's gated perceptron."""
    common = VisionArchitecture(
        32, 1280, 16, 5120, image_size=14, activation="quick_gelu", patch_bias=False, layer_scale=False, pixels="clip",
        native=NativeResolution(),
    )  # fmt: skip
    later = replace(
        common, ffn_hidden_size=later_ffn, normalization="RMSNorm", activation="silu", gated=True,
        native=NativeResolution(window=4, full_layers=(7, 15, 23, 31), positions_per_second=2.0),
    )  # fmt: skip
    language = replace(language, rotary_sections=(16, 24, 24))
    prompt = PromptFormat("qwen-vl", 151655, "qwen2.5-vl" if later_ffn else "qwen-vl", "native")
    vision = later if later_ffn else common
    return Architecture(name, vision, language, projector_norm=False, tied=tied, prompt=prompt)


def _qwen3_vl(name: str, language: LanguageArchitecture, vision: VisionArchitecture, tied: bool) -> Architecture:
    language = replace(language, rope_theta=5e6, rotary_sections=(24, 20, 20), rotary_interleaved=True)
    prompt = PromptFormat("qwen3-vl", 151655, "qwen3-vl", "native")
    return Architecture(name, vision, language, projector_norm=False, tied=tied, prompt=prompt)


def _qwen3_vit(layers: int, hidden_size: int, ffn_hidden_size: int, features: tuple[int, ...]) -> VisionArchitecture:
    return VisionArchitecture(
        layers, hidden_size, 16, ffn_hidden_size, patch_size=16, image_size=16, activation="gelu_tanh",
        layer_scale=False, pixels="half", native=NativeResolution(learned_positions=48), feature_layers=features,
    )  # fmt: skip


QWEN3_VIT, QWEN3_VIT_LARGE = _qwen3_vit(24, 1024, 4096, (5, 11, 17)), _qwen3_vit(27, 1152, 4304, (8, 16, 24))
QWEN3_VL: dict[str, tuple[str, VisionArchitecture, bool]] = {
    "qwen3-vl-2b": ("qwen3-1.7b", QWEN3_VIT, True),
    "qwen3-vl-4b": ("qwen3-4b", QWEN3_VIT, True),
    "qwen3-vl-8b": ("qwen3-8b", QWEN3_VIT_LARGE, False),
    "qwen3-vl-32b": ("qwen3-32b", QWEN3_VIT_LARGE, False),
    "qwen3-vl-30b-a3b": ("qwen3-30b-a3b", QWEN3_VIT_LARGE, False),
    "qwen3-vl-235b-a22b": ("qwen3-235b-a22b", QWEN3_VIT_LARGE, False),
}
QWEN_VL: dict[str, tuple[LanguageArchitecture, int, bool]] = {
    "qwen2-vl-2b": (_qwen(28, 1536, 12, 2, 8960, 151936), 0, True),
    "qwen2-vl-7b": (_qwen(28, 3584, 28, 4, 18944, 152064), 0, False),
    "qwen2-vl-72b": (_qwen(80, 8192, 64, 8, 29568, 152064), 0, False),
    "qwen2.5-vl-3b": (_qwen(36, 2048, 16, 2, 11008, 151936), 3420, True),
    "qwen2.5-vl-7b": (_qwen(28, 3584, 28, 4, 18944, 152064), 3420, False),
    "qwen2.5-vl-32b": (_qwen(64, 5120, 40, 8, 27648, 152064), 3456, False),
    "qwen2.5-vl-72b": (_qwen(80, 8192, 64, 8, 29568, 152064), 3456, False),
}


def _gemma(
    name: str, layers: int, hidden_size: int, heads: int, ffn_hidden_size: int, head_size: int, query_scale: int | None
) -> Architecture:
    near = tuple(layer for layer in range(layers) if (layer + 1) % 6)
    language = LanguageArchitecture(
        layers, hidden_size, heads, heads // 2, ffn_hidden_size, vocab_size=262208, norm_epsilon=1e-6, qk_norm=True,
        head_size=head_size, rope_scaling=RopeScaling("linear", 8.0), activation="gelu_tanh", centred_norms=True,
        branch_norms=True, scaled_words=True, query_scale=query_scale, sliding=SlidingWindow(1024, near, 1e4),
        image_attention=True,
    )  # fmt: skip
    vision = replace(SIGLIP, layers=27, image_size=896, final_norm=True)
    prompt = PromptFormat("gemma", 262144, "gemma", "gemma")
    return Architecture(name, vision, language, shuffle=4, pools=True, tied=True, prompt=prompt)


GEMMA: dict[str, tuple[int, int, int, int, int, int | None]] = {
    "gemma-3-4b": (34, 2560, 8, 10240, 256, None),
    "gemma-3-12b": (48, 3840, 16, 15360, 256, None),
    "gemma-3-27b": (62, 5376, 32, 21504, 128, 168),
}
PRESETS: dict[str, Architecture] = {
    "tiny": TINY,
    **{name: _assembled(name, *parts) for name, parts in INTERNVL.items()},
    **{name: _assembled(name, "clip-l-336", *parts) for name, parts in LLAVA.items()},
    **{name: _onevision(name, *parts) for name, parts in ONEVISION.items()},
    **{name: _qwen_vl(name, *parts) for name, parts in QWEN_VL.items()},
    **{name: _qwen3_vl(name, LANGUAGE_MODELS[parts[0]], *parts[1:]) for name, parts in QWEN3_VL.items()},
    **{name: qwen3_5(name, QWEN3_VIT_LARGE, *parts) for name, parts in QWEN3_5.items()},
    **{name: _gemma(name, *parts) for name, parts in GEMMA.items()},
}


def preset(name: str) -> Architecture:
    """The model of that name: a preset, VISION+LANGUAGE ("internvit-6b+yi-34b"), or a Hugging Face folder.

    A folder with a config.json that is called like a preset is meant: its weights and its tokenizer are used.

    Raises UserError naming the known ones, or the field of a config.json that we cannot honour.
    """
    if name in PRESETS and not find_config(Path(name)):
        return PRESETS[name]
    vision, _, language = name.partition("+")
    if vision in VISION_TOWERS and language in LANGUAGE_MODELS:
        return _assembled(name, vision, language)
    if Path(name).exists():
        return read_architecture(Path(name))
    raise UserError(_unknown(name))


def _unknown(name: str) -> str:
    """What to say of a name that is none: how to have what it names, or the nearest that we know."""
    if HUB_NAME.fullmatch(name):
        folder = name.rpartition("/")[2]
        return (
            f"{name}: no such folder; models are not downloaded here: `hf download {name} --local-dir {folder}` first, "
            f"then {folder}"
        )
    nearest = difflib.get_close_matches(name.lower(), PRESETS, 3, 0.7)
    known = f"the nearest is {' or '.join(nearest)}, all" if nearest else "all"
    return (
        f"unknown preset {name!r}; {known} are in docs/models.md; or VISION+LANGUAGE, as {next(iter(VISION_TOWERS))}+"
        f"{next(iter(LANGUAGE_MODELS))}, or a folder with Hugging Face's config.json"
    )
