"""Presets of InternVL's models, a line each."""

from omnibal_ext.families.family import Preset
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, VISION_TOWERS

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
"""Name -> ViT, language model, chat template."""
IMAGE_TOKEN_IDS = {"internlm2": 92546, "qwen2": 151648, "qwen2.5": 151667, "qwen3": 151671}
"""Id of the image token, which InternVL added behind the language model's vocabulary."""


def assembled(vision: str, language: str, template: str | None = None) -> Preset:
    """Return a preset of a ViT and a language model, by name, with InternVL's projector and prompts."""
    token = IMAGE_TOKEN_IDS.get(language.split("-", 1)[0])
    config = {"vision_config": VISION_TOWERS[vision], "text_config": LANGUAGE_MODELS[language]}
    return Preset(
        {"model_type": "internvl", "tie_word_embeddings": False, **config},
        {"image_token_id": token, "chat_template": template},
    )


PRESETS = {name: assembled(*names) for name, names in INTERNVL.items()}
