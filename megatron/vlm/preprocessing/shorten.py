"""What is left of a conversation that is longer than `--max-tokens`, by the ways that the user allows.

fewer-tiles  its images are cut into fewer tiles, down to `--min-tiles` each
truncate     its last questions and answers are left out, with their images

In the order given; a way that is not enough hands on what it has made. What fits in no way is rejected.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.vlm.data.formats.rows import Place
from megatron.vlm.data.media.tiles import RULES, TiledImage, Tiling, tile_image
from megatron.vlm.data.turns import ASSISTANT, Message
from omnibal_ext.families.markup import MARKS

METHODS = ("fewer-tiles", "truncate")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image before it is cut: path below the root or name inside its file, (width, height) in pixels, place, CRC."""

    path: str
    size: tuple[int, int]
    place: Place = ()
    crcs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """Messages, the images and videos of their marks, and how images are cut; videos are as they will be.

    `tools` are what the assistant is offered, as JSON texts.
    """

    messages: tuple[Message, ...]
    images: tuple[ImageFile | TiledImage, ...]
    tiling: Tiling
    tools: tuple[str, ...] = ()

    def tiled(self) -> tuple[TiledImage, ...]:
        """How each image is cut."""
        return tuple(self._tiled(image) for image in self.images)

    def _tiled(self, image: ImageFile | TiledImage) -> TiledImage:
        if isinstance(image, TiledImage):
            return image
        return tile_image(image.path, image.size, len(self.images), self.tiling, image.place, image.crcs)


def shorter(content: Content, ways: Sequence[str]) -> Iterator[tuple[str, Content]]:
    """Yield ever shorter forms of a conversation, each with the way that made it."""
    form = content
    for way in ways:
        start = form
        for form in _SHORTER[way](start):
            yield way, form


def _fewer_tiles(content: Content) -> Iterator[Content]:
    tiling, images = content.tiling, len(content.images)
    if not images:
        return
    sharing = 1 if RULES[tiling.rule].per_image else images
    for tiles in range(tiling.share(images) - 1, tiling.min_tiles - 1, -1):
        yield replace(content, tiling=replace(tiling, max_tiles=tiles * sharing))


def _truncate(content: Content) -> Iterator[Content]:
    """Up to an answer that is trained: a conversation of which nothing is learnt is none."""
    for end in range(len(content.messages) - 2, 0, -1):
        messages = content.messages[:end]
        if messages[-1].role == ASSISTANT and any(message.teaches for message in messages):
            shown = sum(len(MARKS.findall(message.words)) for message in messages)
            yield replace(content, messages=messages, images=content.images[:shown])


_SHORTER = {"fewer-tiles": _fewer_tiles, "truncate": _truncate}
