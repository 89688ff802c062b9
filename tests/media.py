"""The media of packs, and packs with others."""

from dataclasses import replace
from typing import Any

from megatron.vlm.media import Images, Media
from megatron.vlm.microbatch import Microbatch

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
