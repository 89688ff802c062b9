"""Tiling of models that see images at native resolution: tiles are patches, squares of which become one token."""

from collections.abc import Mapping
from math import ceil, floor, sqrt
from typing import Any

from omnibal_ext.errors import Rejected
from omnibal_ext.modalities.vision.tiling import SQUARE, Grid, Processor, TilingRule
from omnibal_ext.reading.checks import shown

MOST_TIMES_LONGER = 200  # as transformers' processors say


def patches(least: int, most: int) -> Mapping[str, Any]:
    """Return a rule's usual flags: the fewest and most patches of an image, and no thumbnail."""
    return {"min-tiles": least, "max-tiles": most, "thumbnail": False}


class Native(TilingRule):
    """Patches of an image at nearly its own size, in squares that become a token each (Qwen2-VL, arXiv 2409.12191)."""

    name, read_as, square = "native", "squares of patches", SQUARE
    native = per_image = needs_image_starts = True
    side_fields = ()
    usual = patches(16, 5120)
    counts_frames = False
    """Whether the processor counts each pixel once per equal frame."""

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of `least` to `most` patches, in entire squares. Raises `Rejected` (too_narrow)."""
        return square_grid(width, height, tile_size, least * tile_size**2, most * tile_size**2)

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return limits of patches as flags; the file has them in pixels, or in tokens. Raises UserError for others."""
        fields, native, patch = processor.fields, processor.model.vision.native, processor.model.vision.patch_size
        assert native is not None
        wanted = {"patch_size": patch, "temporal_patch_size": native.frames}
        for name, value in (wanted | dict.fromkeys(("merge_size", "pooling_kernel_size"), native.merge)).items():
            if fields.get(name) not in (None, value):
                raise processor.fault(f"{name} is {shown(fields[name])}, the model of config.json has {value}")
        if tokens := fields.get("max_soft_tokens"):
            return {"max-tiles": tokens * native.merge**2}
        found, pixels = {}, patch**2 * (native.frames if self.counts_frames else 1)
        flags = {"min-tiles": ("min_pixels", "shortest_edge"), "max-tiles": ("max_pixels", "longest_edge")}
        for flag, (name, edge) in flags.items():
            limit = fields.get(name) or processor.limit(name) or processor.limit(edge)
            if limit is None:
                continue
            if limit % pixels:
                raise processor.fault(f"{name} is {limit}; supported: multiples of {pixels}, a patch's")
            found[flag] = limit // pixels
        return found


def grown(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return (width, height) scaled, both by one factor, so that neither is shorter than `side`."""
    larger = max(side / length for length in size)
    return (int(size[0] * larger), int(size[1] * larger)) if larger > 1 else size


def square_grid(
    width: int, height: int, patch: int, least: int, most: int, frames: int = 1, whole_frames: int = 1
) -> Grid:
    """Return (columns, rows) of patches of `patch` pixels, in entire squares, `least` to `most` pixels, for an image or
    frames at nearly their own size.

    Whether limits hold is judged by `whole_frames` frames, the scale computed for `frames`. Raises `Rejected`
    (too_narrow).
    """
    if max(width, height) > MOST_TIMES_LONGER * min(width, height):
        raise Rejected("too_narrow", f"{width} x {height} pixels, one side over {MOST_TIMES_LONGER} times the other")
    side = SQUARE * patch
    columns, rows = round(width / side), round(height / side)
    pixels = whole_frames * columns * rows * side**2
    if pixels > most:
        shrink = sqrt(frames * height * width / most)
        columns, rows = (max(1, floor(length / shrink / side)) for length in (width, height))
    elif pixels < least:
        grow = sqrt(least / (frames * height * width))
        columns, rows = (ceil(length * grow / side) for length in (width, height))
    return columns * SQUARE, rows * SQUARE
