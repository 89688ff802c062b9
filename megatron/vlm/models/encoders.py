"""The registry of encoders' links, by modality."""

from collections.abc import Mapping

from megatron.vlm.models.audio import AudioLinks
from megatron.vlm.models.encoder_links import EncoderLinks
from megatron.vlm.models.films import FilmLinks
from megatron.vlm.models.vit.links import VisionLinks
from omnibal_ext.modalities.modality import AUDIO, FILM, VISION, Modality

ENCODERS: Mapping[Modality, EncoderLinks] = {VISION: VisionLinks(), AUDIO: AudioLinks(), FILM: FilmLinks()}
