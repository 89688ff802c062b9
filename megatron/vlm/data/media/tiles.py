"""Cutting of a dataset's images: a tiling rule by its name (`families.media.TILINGS`) and its limits."""

from dataclasses import dataclass

from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.modalities.vision.tiling import TiledImage


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tiling rule and its limits: `tile_size` in pixels, tile counts without the thumbnail.

    `max_tiles` is per image (`TilingRule.per_image`), or per conversation and divided equally among its images, as in
    InternVL's multi-image training.
    """

    tile_size: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    rule: str = "internvl"

    def __post_init__(self) -> None:
        if self.rule not in TILINGS:
            raise UserError(f"unknown tiling rule {self.rule!r}; known: {', '.join(TILINGS)}")
        rule, patches = TILINGS[self.rule], TILINGS[self.rule].square ** 2
        if rule.always_thumbnail and not self.thumbnail:
            raise UserError(f"tiling rule {self.rule!r} has a thumbnail always; leave --no-thumbnail out")
        if rule.native and (self.thumbnail or self.max_tiles < patches):
            raise UserError(f"tiling rule {self.rule!r} has no thumbnail and squares of {patches} patches at least")
        if not 1 <= self.min_tiles <= self.max_tiles or self.tile_size < 1:
            raise UserError(
                f"tile size {self.tile_size}, {self.min_tiles} to {self.max_tiles} tiles: all must be 1 or more, "
                "and the most no fewer than the least"
            )

    def share(self, images: int) -> int:
        """Return the most tiles of each of a conversation's `images` images."""
        return self.max_tiles if TILINGS[self.rule].per_image else max(1, self.max_tiles // images)


def tile_image(
    path: str, size: tuple[int, int], images: int, tiling: Tiling, place: Place = (), crcs: tuple[Mark, ...] = ()
) -> TiledImage:
    """Choose the grid of an image of `size` (width, height) pixels, one of `images` in its conversation."""
    rule, share = TILINGS[tiling.rule], tiling.share(images)
    grid, several = rule.layout(size, images, tiling.tile_size, min(tiling.min_tiles, share), share)
    kept = size if rule.joins_tiles else (0, 0)
    return TiledImage(path, *grid, tiling.thumbnail and several, *kept, place, crcs=crcs)
