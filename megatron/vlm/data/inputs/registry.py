"""Registry of the readers of encoders' inputs, by modality."""

from collections.abc import Mapping

from megatron.vlm.data.dataset_folder import DatasetFolder
from megatron.vlm.data.inputs.films import FilmReader
from megatron.vlm.data.inputs.images import ImageReader
from megatron.vlm.data.inputs.reader import InputReader
from megatron.vlm.data.inputs.sounds import SoundReader
from omnibal_ext.modalities.modality import AUDIO, FILM, VISION, Modality, Size

READERS: Mapping[Modality, type[InputReader]] = {VISION: ImageReader, AUDIO: SoundReader, FILM: FilmReader}


def readers_of(data: DatasetFolder) -> dict[Size, InputReader]:
    """Make the readers of all inputs that a dataset's samples may have."""
    return {one.size: reader(data) for one, reader in READERS.items() if one.size in data.media_tokens}
