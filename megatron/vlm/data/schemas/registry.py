"""Registry of schemas of inputs, by modality."""

from collections.abc import Mapping

from megatron.vlm.data.schemas import films, images, sounds
from megatron.vlm.data.schemas.schema import Schema
from omnibal_ext.modalities.modality import AUDIO, FILM, VISION, Modality

SCHEMAS: Mapping[Modality, Schema] = {VISION: images.SCHEMA, AUDIO: sounds.SCHEMA, FILM: films.SCHEMA}
