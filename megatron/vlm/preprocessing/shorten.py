"""Shorten conversations longer than `--max-tokens`, by the methods of `--shorten`:

fewer-tiles  cut images into fewer tiles, down to `--min-tiles` each
truncate     drop the last questions and answers, with their images and sounds

Methods apply in the given order, each to the result of the one before. What never fits is rejected.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.data.turns import ASSISTANT, Message
from omnibal_ext.families.markup import AUDIO_MARK, MARKS
from omnibal_ext.families.media import TILINGS
from omnibal_ext.modalities.audio.sounds import Sound
from omnibal_ext.modalities.place import Place
from omnibal_ext.modalities.vision.tiling import TiledImage

METHODS = ("fewer-tiles", "truncate")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A measured image: path and `place` as in `TiledImage`, (width, height) in pixels, CRC-32."""

    path: str
    size: tuple[int, int]
    place: Place = ()
    crcs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeardVideo:
    """A video, and its own sound."""

    video: TiledImage
    sound: Sound


@dataclass(frozen=True, slots=True)
class Content:
    """Messages, an image, (already cut) video or sound for each mark, the tiling, and tools as JSON texts."""

    messages: tuple[Message, ...]
    images: tuple[ImageFile | TiledImage | HeardVideo, ...]
    tiling: Tiling
    tools: tuple[str, ...] = ()
    sounds: tuple[Sound, ...] = ()

    def tiled(self) -> tuple[TiledImage, ...]:
        """All images and videos, cut."""
        return tuple(self._tiled(image) for image in self.images)

    def heard(self) -> tuple[Sound, ...]:
        """All sounds in the order of their marks, those of videos too."""
        sounds, images, found = iter(self.sounds), enumerate(self.images), []
        for mark in (mark for message in self.messages for mark in MARKS.findall(message.words)):
            if mark == AUDIO_MARK:
                found.append(next(sounds))
                continue
            number, image = next(images)
            if isinstance(image, HeardVideo):
                found.append(replace(image.sound, video=number))
        return tuple(found)

    def _tiled(self, image: ImageFile | TiledImage | HeardVideo) -> TiledImage:
        if isinstance(image, HeardVideo):
            return image.video
        if isinstance(image, TiledImage):
            return image
        return tile_image(image.path, image.size, len(self.images), self.tiling, image.place, image.crcs)


def shorter(content: Content, methods: Sequence[str]) -> Iterator[tuple[str, Content]]:
    """Yield (method, ever shorter conversation)."""
    form = content
    for method in methods:
        start = form
        for form in _SHORTER[method](start):
            yield method, form


def _fewer_tiles(content: Content) -> Iterator[Content]:
    tiling, images = content.tiling, len(content.images)
    if not images:
        return
    sharing = 1 if TILINGS[tiling.rule].per_image else images
    for tiles in range(tiling.share(images) - 1, tiling.min_tiles - 1, -1):
        yield replace(content, tiling=replace(tiling, max_tiles=tiles * sharing))


def _truncate(content: Content) -> Iterator[Content]:
    """Cut after earlier and earlier answers, as long as one that is trained remains."""
    for end in range(len(content.messages) - 2, 0, -1):
        messages = content.messages[:end]
        if messages[-1].role == ASSISTANT and any(message.teaches for message in messages):
            marks = [mark for message in messages for mark in MARKS.findall(message.words)]
            heard = marks.count(AUDIO_MARK)
            images, sounds = content.images[: len(marks) - heard], content.sounds[:heard]
            yield replace(content, messages=messages, images=images, sounds=sounds)


_SHORTER = {"fewer-tiles": _fewer_tiles, "truncate": _truncate}
