"""Tiling of PaddleOCR-VL's images at native resolution."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omnibal_ext.families.towers.tiling import Native, patches, square_grid
from omnibal_ext.modalities.vision.tiling import SQUARE, Grid, Processor

PATCH = 14
PIXELS = {751: 147384, 752: 384**2, 12037: 1536**2}
"""Limits of transformers' processor and, from memory, of a published file that are no whole patches of 14 pixels: the
whole ones that stand for them -> pixels."""


class NativeWidened(Native):
    """Patches of images whose sides, if shorter than a square of patches, are first enlarged to it, height first."""

    name, usual = "native_widened", patches(752, 12037)

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of patches, in entire squares, of the image as enlarged; where `least` or `most` is a
        key of `PIXELS`, its number of pixels is the limit. Raises `Rejected` (too_narrow)."""
        exact = PIXELS if tile_size == PATCH else {}
        limits = (exact.get(count, count * tile_size**2) for count in (least, most))
        return square_grid(*widened(width, height, SQUARE * tile_size), tile_size, *limits)

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return `Native.limits`; pixels in `PIXELS`, no whole patches, are read as the patches they stand for."""
        fields = processor.fields
        given: dict[str, Any] = {name: fields.get(name) for name in ("min_pixels", "max_pixels") if name in fields}
        size = fields.get("size")
        sizes = {"size": _in_patches(size)} if isinstance(size, Mapping) else {}
        return super().limits(replace(processor, fields=fields.changed(_in_patches(given) | sizes)))


def widened(width: int, height: int, side: int) -> tuple[int, int]:
    """Return (width, height) enlarged in proportion, first to a height, then to a width, of at least `side`."""
    if height < side:
        width, height = round(width * side / height), side
    if width < side:
        width, height = side, round(height * side / width)
    return width, height


def _in_patches(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with limits of pixels found in `PIXELS` rounded to the whole patches that stand for them."""
    whole = {pixels: count * PATCH**2 for count, pixels in PIXELS.items()}
    return {name: whole.get(value, value) for name, value in fields.items()}
