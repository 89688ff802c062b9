"""Rules by which Qwen's thinkers hear: what transformers' processors ask of the feature extractor, as published."""

from collections.abc import Callable
from functools import partial

from omnibal_ext.modalities.audio.sounds import SoundRule

SOUND_RULES: dict[str, Callable[..., SoundRule]] = {
    "qwen2.5-omni": partial(SoundRule, longest=300),  # padding="max_length", truncation
    "qwen3-omni": SoundRule,  # padding=True, which adds nothing to a sound alone, and no truncation
}
