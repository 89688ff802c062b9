"""Images and videos of a pack: their tiles, black where one cannot be read."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.dataset import Sample
from megatron.vlm.data.inputs.reader import Broken, InputReader
from megatron.vlm.data.media.videos import join_tiles
from megatron.vlm.media import Images, Media, together
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import Units
from omnibal_ext.modalities.vision.features import FeatureOrder, joined_orders
from omnibal_ext.modalities.vision.tiling import FRAMES, TiledImage


class Shown(NamedTuple):
    """An image of a pack, and which of its tiles are to be read."""

    sample: Sample
    image: TiledImage
    rows: NDArray[np.bool_] | slice = slice(None)

    @property
    def tiles(self) -> int:
        """Tiles to be read."""
        return len(np.arange(self.image.tiles)[self.rows])


class ImageReader(InputReader):
    """Images and videos."""

    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Images:
        """Where each run of image tokens starts and, at native resolution, its grid, the seconds between a video's
        steps, and how it and its own sound take turns. If tiles are joined, which features each image token is."""
        rule, seen = self.data.rule, [pair for pair in zip(begins, samples, strict=False) if pair[1].tiles]
        starts = [begin + one for begin, sample in seen if rule.needs_image_starts for one in sample.image_starts]
        images = [image for _, sample in seen if rule.native for image in sample.images]
        turns = [one for _, sample in seen if rule.native for one in sample.turns]
        return Images(
            units=together(sum(sample.tiles for sample in samples)),
            grids=tuple(grid for image in images for grid in image.grids),
            starts=tuple(starts),
            seconds=tuple(image.film.seconds if image.film else 1.0 for image in images for _ in image.grids),
            turns=tuple(turns) if any(turns) else (),
            **(self._order(samples) if rule.joins_tiles and reads_tokens else {}),
        )

    def _order(self, samples: Sequence[Sample]) -> dict[str, Any]:
        pairs = chain.from_iterable(zip(one.images, one.orders, strict=True) for one in samples)
        each = self.data.manifest["tokens_per_tile"]
        return order_tensors((image.tiles * each, order) for image, order in pairs)

    def parts(self, samples: Sequence[Sample]) -> list[Shown]:
        """All images."""
        return [Shown(sample, image) for sample in samples if sample.tiles for image in sample.images]

    def read(self, media: Media, parts: Sequence[Shown], decodes: bool = True) -> tuple[Media, Broken]:
        """With uint8 pixels, and the statistics to normalise them."""
        pixels, broken = read_tiles(parts, self.data.manifest["tile_size"], decodes)
        assert isinstance(media, Images)
        return replace(media, values=pixels, statistics=self.data.normalization), broken

    def units(self, samples: Sequence[Sample]) -> Units:
        """Tiles, or at native resolution the patches of an image or of a video's step."""
        return tuple((size,) for one in self.parts(samples) for size in self._units(one.image))

    def share(self, samples: Sequence[Sample], units: Units, encodes: Sequence[bool]) -> tuple[Images, list[Shown]]:
        """The tiles that a rank encodes."""
        here, shown, grids = iter(encodes), list[Shown](), list[tuple[int, int, int]]()
        for one in self.parts(samples):
            sizes = self._units(one.image)
            mine = [next(here) for _ in sizes]
            if any(mine):
                shown.append(one._replace(rows=np.repeat(mine, sizes)))
                grids += compress(one.image.grids, mine) if self.data.rule.native else []
        return Images(units=units, encodes=tuple(encodes), grids=tuple(grids)), shown

    def _units(self, image: TiledImage) -> list[int]:
        """Tiles or patches of each part of an image that is encoded on one rank."""
        return [n * rows * columns for n, rows, columns in image.grids] if self.data.rule.native else [1] * image.tiles


def read_tiles(shown: Sequence[Shown], size: int, decodes: bool = True) -> tuple[Tensor, Broken]:
    """uint8 [tiles, size, size, 3], with videos [tiles, FRAMES, size, size, 3]; and images that cannot be read, whose
    tiles are black. Unless `decodes`, and without tiles, it is a meta tensor.
    """
    if not decodes or not shown:
        frames = (FRAMES,) if any(image.film for _, image, _ in shown) else ()
        shape = (sum(one.tiles for one in shown), *frames, size, size, 3)
        return torch.empty(shape, dtype=torch.uint8, device="meta"), {}
    tiles, broken = [], dict[int, str]()
    for one in shown:
        try:
            tiles.append(one.sample.read(one.image)[one.rows])
        except UserError as error:
            broken.setdefault(one.sample.number, str(error))
            frames = (FRAMES,) if one.image.film else ()  # the other ranks expect this shape
            tiles.append(np.zeros((one.tiles, *frames, size, size, 3), dtype=np.uint8))
    return torch.from_numpy(join_tiles(tiles)), broken


def order_tensors(images: Iterable[tuple[int, FeatureOrder]]) -> dict[str, Any]:
    """`joined_orders` as fields of `Images`."""
    order = joined_orders(images)
    found: dict[str, Any] = {"sources": torch.from_numpy(order.sources)}
    return found if order.weights is None else found | {"weights": torch.from_numpy(order.weights)}
