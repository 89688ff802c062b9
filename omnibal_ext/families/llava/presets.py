"""Presets of LLaVA's models, a line each."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, SIGLIP, VISION_TOWERS

LLAVA = {
    "llava-1.5-7b": ("vicuna-7b", "vicuna", "pad"),
    "llava-1.5-13b": ("vicuna-13b", "vicuna", "pad"),
    "llava-1.6-vicuna-7b": ("vicuna-7b", "vicuna", "anyres"),
    "llava-1.6-vicuna-13b": ("vicuna-13b", "vicuna", "anyres"),
    "llava-1.6-mistral-7b": ("mistral-7b", "mistral", "anyres"),
    "llava-1.6-llama3-8b": ("llama3-8b", "llava-llama3", "anyres"),
}
"""Name -> language model, chat template, tiling."""
ONEVISION = {
    "llava-onevision-0.5b": ("qwen2-0.5b", 152000, True),
    "llava-onevision-7b": ("qwen2.5-7b", 152128, False),
    "llava-onevision-72b": ("qwen2.5-72b", 152128, False),
}
"""Name -> language model, vocabulary size, whether tied. The vocabulary is the language model's and three tokens of its
own, filled up to a multiple of 64."""
NEXT_VIDEO = {"llava-next-video-7b": "vicuna-7b", "llava-next-video-7b-32k": "mistral-7b"}
"""Language model by the preset's name."""
VIP = {"vip-llava-7b": "vicuna-7b", "vip-llava-13b": "vicuna-13b"}
"""Language model by the preset's name."""
IMAGE_TOKEN_IDS = {"vicuna": 32000, "mistral": 32000, "llama3": 128256, "yi": 64000}
"""Id of the image token, which LLaVA added behind the language model's vocabulary."""


def assembled(vision: str, language: str, template: str | None = None, tiling: str = "pad") -> Preset:
    """Return a preset of a ViT and a language model, by name, with LLaVA's projector and prompts."""
    token = IMAGE_TOKEN_IDS.get(language.split("-", 1)[0])
    config = _config("llava_next" if tiling == "anyres" else "llava", vision, language)
    return Preset(config, {"image_token_id": token, "chat_template": template})


def _config(kind: str, vision: str, language: str) -> dict[str, Any]:
    return {"model_type": kind, "vision_config": VISION_TOWERS[vision], "text_config": LANGUAGE_MODELS[language]}


def _onevision(language: str, words: int, tied: bool) -> Preset:
    text = {**LANGUAGE_MODELS[language], "vocab_size": words}
    vision = {**SIGLIP, "num_hidden_layers": 26}  # the last layer is not in its files
    return Preset(
        {"model_type": "llava_onevision", "vision_config": vision, "text_config": text, "tie_word_embeddings": tied}
    )


PRESETS = {
    **{name: assembled("clip-l-336", *names) for name, names in LLAVA.items()},
    **{name: Preset(_config("llava_next_video", "clip-l-336", language)) for name, language in NEXT_VIDEO.items()},
    **{name: Preset(_config("vipllava", "clip-l-336", language)) for name, language in VIP.items()},
    **{name: _onevision(*names) for name, names in ONEVISION.items()},
}
