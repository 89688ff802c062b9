"""Registry of kinds of media in records: how files, fields and messages name them."""

from dataclasses import dataclass, replace

from omnibal_ext.families.markup import IMAGE_MARK, VIDEO_MARK
from omnibal_ext.modalities.modality import AUDIO, FILM, VISION, Modality


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of media, such as videos: how messages, records and files name it."""

    modality: Modality
    """Modality of the encoder that reads it."""
    mark: str
    noun: str
    plural: str
    fields: tuple[str, ...]
    """Names of a record's fields that have it."""
    parts: tuple[str, ...]
    """Types of message parts that have it."""
    endings: tuple[str, ...]
    """Endings of its files."""
    others: tuple[str, ...] = ()
    """Marks for it in other programs."""
    of_frames: bool = False
    """Whether it may be a list of frames, with their times."""


IMAGES = Kind(
    VISION, IMAGE_MARK, "an image", "images", ("image", "images"), ("image", "image_url"),
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"),
)  # fmt: skip
VIDEOS = Kind(
    VISION, VIDEO_MARK, "a video", "videos", ("video", "videos"), ("video", "video_url"),
    (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"), (IMAGE_MARK,), of_frames=True,
)  # fmt: skip
SOUNDS = Kind(
    AUDIO, AUDIO.mark, "a sound", "sounds", ("audio", "audios", "sound", "sounds"),
    ("audio", "audio_url", "input_audio"),
    (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".oga", ".opus", ".aif", ".aiff"), ("<sound>",),
)  # fmt: skip
FILMS = replace(VIDEOS, modality=FILM)
MEDIA = (IMAGES, VIDEOS, SOUNDS, FILMS)
"""All kinds. Several may have one mark and the same fields: a model takes one of them."""
