"""Chains of layers for tests."""

from omnibal_ext import chain
from omnibal_ext.modalities.modality import AUDIO, LANGUAGE, VISION


def layer_chain(vit_layers: int, llm_layers: int, audio_layers: int | None = None) -> tuple[str, ...]:
    """A chain with so many layers of each tower; `audio_layers` None: it does not hear."""
    heard = {} if audio_layers is None else {AUDIO: audio_layers}
    return chain.layer_chain({VISION: vit_layers, LANGUAGE: llm_layers, **heard})
