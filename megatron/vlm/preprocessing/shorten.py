"""Shorten conversations longer than `--max-tokens`, by the methods of `--shorten`:

fewer-tiles  cut images into fewer tiles, down to `--min-tiles` each
truncate     drop the last questions and answers, with their images and sounds

Methods apply in the given order, each to the result of the one before. What never fits is rejected.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.data.turns import ASSISTANT, Message
from omnibal_ext.families.media import TILINGS
from omnibal_ext.modalities.audio.sounds import Sound
from omnibal_ext.modalities.item import Item
from omnibal_ext.modalities.modality import AUDIO, VISION, Modality
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.modalities.vision.tiling import TiledImage


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A measured image: path and `place` as in `TiledImage`, (width, height) in pixels, `Mark`."""

    modality: ClassVar[Modality] = VISION
    path: str
    size: tuple[int, int]
    place: Place = ()
    crcs: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class HeardVideo:
    """A video, and its own sound."""

    modality: ClassVar[Modality] = VISION
    video: TiledImage
    sound: Sound


Measured = ImageFile | HeardVideo | Item
"""What is known of the medium of a mark: an image that is yet to be cut, else as datasets list it."""


@dataclass(frozen=True, slots=True)
class Content:
    """Messages with the media of their marks, the tiling, and tools as JSON texts."""

    messages: tuple[Message, ...]
    media: tuple[tuple[Measured, ...], ...]
    """Media of each message, in the order of its marks."""
    tiling: Tiling
    tools: tuple[str, ...] = ()

    @property
    def measured(self) -> Iterator[Measured]:
        """The media of all messages."""
        return chain.from_iterable(self.media)

    @property
    def images(self) -> int:
        """Number of images and videos."""
        return sum(one.modality == VISION for one in self.measured)

    def items(self) -> dict[Modality, tuple[Any, ...]]:
        """Return what each encoder reads, in the order of its tokens: images cut, sounds of videos too."""
        found, images = {VISION: list[Any]()}, self.images
        for one in self.measured:
            item: Any = one
            if isinstance(one, HeardVideo):
                found.setdefault(AUDIO, []).append(replace(one.sound, video=len(found[VISION])))
                item = one.video
            elif isinstance(one, ImageFile):
                item = tile_image(one.path, one.size, images, self.tiling, one.place, one.crcs)
            found.setdefault(item.modality, []).append(item)
        return {modality: tuple(items) for modality, items in found.items()}


def shorter(content: Content, methods: Sequence[str]) -> Iterator[tuple[str, Content]]:
    """Yield (method, conversation), ever shorter: each method goes on from the last result of the one before."""
    form = content
    for method in methods:
        start = form
        for form in _SHORTER[method](start):
            yield method, form


def _fewer_tiles(content: Content) -> Iterator[Content]:
    tiling, images = content.tiling, content.images
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
            yield replace(content, messages=messages, media=content.media[:end])


_SHORTER = {"fewer-tiles": _fewer_tiles, "truncate": _truncate}
