"""Tiling of Mistral 3's images at native resolution (Pixtral, arXiv 2410.07073)."""

from math import floor, isqrt
from typing import Any

from omnibal_ext.architectures.folder import PROCESSOR
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.processor_fields import SIDE, read_fields
from omnibal_ext.families.towers.tiling import Native, patches
from omnibal_ext.modalities.vision.runs import TokenRuns
from omnibal_ext.modalities.vision.tiling import SQUARE, Grid, Processor, TiledImage


class NativeEdge(Native):
    """Patches of images that fit into a square of `most` patches, rounded up; a row of features is a run of tokens."""

    name, read_as = "native_edge", "rows of squares"
    needs_image_starts, usual = False, patches(1, 110**2)

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of patches, in entire squares, of the image shrunk to fit. May raise `Rejected`."""
        side = SQUARE * tile_size
        edge = isqrt(most) // SQUARE * side
        ratio = max(height / edge, width / edge)
        if ratio > 1:
            if min(width, height) < ratio:
                raise Rejected("too_narrow", f"{width} x {height} pixels, less than one a side of {edge} at most")
            width, height = floor(width / ratio), floor(height / ratio)
        return ((width - 1) // side + 1) * SQUARE, ((height - 1) // side + 1) * SQUARE

    def runs(self, image: TiledImage) -> TokenRuns:
        """Return a run of tokens for each row of squares of patches."""
        return TokenRuns(image.rows // SQUARE)

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return the most patches if the file limits the longer side. Raises UserError for patches not the model's."""
        own, side = processor.where.with_name(PROCESSOR), processor.model.vision.patch_size
        fields, square, edge = read_fields(own), side * SQUARE, processor.limit("longest_edge")
        usual = {"patch_size": 16, "spatial_merge_size": 1}
        patch, merge = (SIDE(f"{own}: {name}", fields.get(name) or usual[name]) for name in usual)
        if processor.fields and patch * merge != square:
            raise UserError(
                f"{own}: patches of {patch} pixels, {merge} a side, the model of config.json has {square} pixels"
            )
        if edge is not None and edge % square:
            raise processor.fault(f"longest_edge is {edge}; supported: multiples of {square}, a square's")
        return {} if edge is None else {"max-tiles": (edge // side) ** 2}
