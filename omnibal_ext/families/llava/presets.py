"""LLaVA's models, a line each."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, SIGLIP, VISION_TOWERS, language_type

LLAVA = {
    "llava-1.5-7b": ("vicuna-7b", "vicuna", "pad"),
    "llava-1.5-13b": ("vicuna-13b", "vicuna", "pad"),
    "llava-1.6-vicuna-7b": ("vicuna-7b", "vicuna", "anyres"),
    "llava-1.6-vicuna-13b": ("vicuna-13b", "vicuna", "anyres"),
    "llava-1.6-mistral-7b": ("mistral-7b", "mistral", "anyres"),
    "llava-1.6-llama3-8b": ("llama3-8b", "llava-llama3", "anyres"),
}
"""Name: language model, chat template, tiling."""
ONEVISION = {
    "llava-onevision-0.5b": ("qwen2-0.5b", 152000, True),
    "llava-onevision-7b": ("qwen2.5-7b", 152128, False),
    "llava-onevision-72b": ("qwen2.5-72b", 152128, False),
}
"""Name: language model, words, whether tied. Words are those of the language model and three of its own, filled up to
a multiple of 64."""
NEXT_VIDEO = {
    "llava-next-video-7b": ("vicuna-7b", "vicuna"),
    "llava-next-video-7b-32k": ("mistral-7b", "mistral"),
}
"""Name: language model, chat template."""
VIP = {"vip-llava-7b": "vicuna-7b", "vip-llava-13b": "vicuna-13b"}
"""Name: language model."""
IMAGE_TOKEN_IDS = {"vicuna": 32000, "mistral": 32000, "llama3": 128256, "yi": 64000}
"""Where image features go: a token that the model's makers added, so its id follows from the vocabulary before it."""


def assembled(name: str, vision: str, language: str, template: str | None = None, tiling: str = "pad") -> Architecture:
    """A ViT and a language model, with LLaVA's projector and prompts."""
    sizes, token = LANGUAGE_MODELS[language], IMAGE_TOKEN_IDS.get(language.split("-", 1)[0])
    newline = tiling == "anyres"
    return Architecture(
        name,
        VISION_TOWERS[vision],
        sizes,
        shuffle=1,
        projector_norm=False,
        newline=newline,
        prompt=PromptFormat("llava", token, template, tiling),
        types=("llava_next" if newline else "llava", language_type(sizes)),
    )


def _next_video(name: str, language: str, template: str) -> Architecture:
    """LLaVA-1.6, to whose words a video's was added before an image's."""
    model = assembled(name, "clip-l-336", language, template, "anyres")
    return replace(model, prompt=replace(model.prompt, image_token_id=32001), types=("llava_next_video", "llama"))


def _vip(name: str, language: str) -> Architecture:
    model = assembled(name, "clip-l-336", language, "llava-v1")
    vision = replace(model.vision, feature_layers=(5, 13, 16, 19), side_by_side=(4, 3, 2, 1, 0))
    return replace(model, vision=vision, projector_norm=True, types=("vipllava", "llama"))


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
        types=("llava_onevision", "llama"),
    )


PRESETS = {
    **{name: assembled(name, "clip-l-336", *parts) for name, parts in LLAVA.items()},
    **{name: _next_video(name, *parts) for name, parts in NEXT_VIDEO.items()},
    **{name: _vip(name, language) for name, language in VIP.items()},
    **{name: _onevision(name, *parts) for name, parts in ONEVISION.items()},
}
