"""The registry of encoders' layers, by modality."""

from collections.abc import Mapping

from megatron.vlm.models.audio import AudioLayers
from megatron.vlm.models.encoder_layers import EncoderLayers
from megatron.vlm.models.films import FilmLayers
from megatron.vlm.models.vit.encoder import VisionLayers
from omnibal_ext.modalities.modality import AUDIO, FILM, VISION, Modality

ENCODERS: Mapping[Modality, EncoderLayers] = {VISION: VisionLayers(), AUDIO: AudioLayers(), FILM: FilmLayers()}
