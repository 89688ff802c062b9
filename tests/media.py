"""The media of packs, and packs with others."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.inputs.images import ImageReader
from megatron.vlm.data.inputs.sounds import SoundReader
from megatron.vlm.data.sample import Sample
from megatron.vlm.media import Images, Media
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.audio.architecture import AudioArchitecture

seen = Images.of


def heard(pack: Microbatch) -> Media:
    """The sounds of a pack."""
    return pack.media_of("frames")


def with_images(pack: Microbatch, **changes: Any) -> Microbatch:
    """The pack with other images."""
    return replace(pack, media={**pack.media, "tiles": replace(seen(pack), **changes)})


def with_sounds(pack: Microbatch, **changes: Any) -> Microbatch:
    """The pack with other sounds."""
    return replace(pack, media={**pack.media, "frames": replace(heard(pack), **changes)})


def tiles_of(sample: Sample) -> NDArray[np.uint8]:
    """The tiles of all its images."""
    return ImageReader(sample.data).decode_all(sample)


def mels_of(sample: Sample) -> Tensor:
    """The mel frames of all its sounds."""
    found = SoundReader(sample.data).decode_all(sample)
    assert isinstance(found, Tensor)
    return found


def audio_of(model: Architecture) -> AudioArchitecture | None:
    """Its encoder of sounds; None: the model does not hear."""
    return next((one for one in model.further if isinstance(one, AudioArchitecture)), None)
