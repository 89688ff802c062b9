"""Images and videos of a pack: their tiles, black where one cannot be read."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.inputs.reader import Broken, Cut, InputReader, read_each
from megatron.vlm.data.media.images import load_rgb
from megatron.vlm.data.media.videos import cut_frames, join_tiles, read_frames, require_decoder
from megatron.vlm.data.sample import Sample
from megatron.vlm.media import Images, Media, together
from megatron.vlm.pixels import normalise
from omnibal_ext.image_assignment import Pieces
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.modalities.vision.features import FeatureOrder, joined_orders
from omnibal_ext.modalities.vision.tiling import FRAMES, TiledImage


class Shown(NamedTuple):
    """An image of a pack, and which of its tiles are to be read."""

    sample: Sample
    image: TiledImage
    rows: NDArray[np.bool_] | slice = slice(None)

    @property
    def tiles(self) -> int:
        """Number of tiles to be read."""
        return len(np.arange(self.image.tiles)[self.rows])


class ImageReader(InputReader):
    """Images and videos: tiles, or patches at native resolution."""

    modality = VISION

    def require(self) -> None:
        """Raise UserError naming what to install if the dataset has video files and no decoder is installed."""
        if self.data.manifest.get("video_files"):
            require_decoder(str(self.data.folder))

    @property
    def side(self) -> int:
        """Side of a tile in pixels."""
        side: int = self.data.manifest["tile_size"]
        return side

    def _cut(self, item: TiledImage) -> Cut:
        """Return how an image or video is cut: tiles [tiles, side, side, 3], a video's [tiles, FRAMES, ...]."""
        frames = (FRAMES,) if item.film else ()
        return Cut(self.data.rule.name, (item.tiles, *frames, self.side, self.side, 3))

    def _decoded(self, root: Path, path: Path, item: TiledImage) -> NDArray[np.uint8]:
        if item.film:
            return _video_tiles(root, path, item, self.side)
        return self.data.rule.cut(load_rgb(path, item.place, *item.crcs), item, self.side)

    def values(self, sample: Sample, item: TiledImage) -> Tensor:
        """Decode an image, normalised: fp32 [tiles, 3, side, side], a video's [tiles, 3, FRAMES, ...]. Raises as
        `decode`."""
        return normalise(torch.from_numpy(self.decode(sample, item)), self.data.normalization)

    def decode_all(self, sample: Sample) -> NDArray[np.uint8]:
        """Decode a sample's images: uint8 [tiles, side, side, 3]; [tiles, FRAMES, side, side, 3] if one is a video."""
        nothing = np.zeros((0, self.side, self.side, 3), dtype=np.uint8)
        return join_tiles([nothing, *(self.decode(sample, image) for image in sample.images)])

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """Return pixel_values (`pixels_of`) and images (`Sample.images`)."""
        return {"pixel_values": pixels_of(sample), "images": tuple(sample.images)}

    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Images:
        """Return a pack's images without pixels: starts of runs of image tokens; at native resolution grids, seconds
        between a video's steps, turns with its own sound; if tiles are joined, which feature each image token is."""
        rule, seen = self.data.rule, [pair for pair in zip(begins, samples, strict=False) if pair[1].tiles]
        starts = [begin + one for begin, sample in seen if rule.needs_image_starts for one in sample.image_starts]
        images = [image for _, sample in seen if rule.native for image in sample.images]
        turns = [one for _, sample in seen if rule.native for one in sample.turns]
        return Images(
            pieces=together(sum(sample.tiles for sample in samples)),
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

    def inputs(self, samples: Sequence[Sample]) -> list[Shown]:
        """Return all images of samples, each with all of its tiles."""
        return [Shown(sample, image) for sample in samples if sample.tiles for image in sample.images]

    def read(self, media: Media, inputs: Sequence[Shown], decodes: bool = True) -> tuple[Media, Broken]:
        """Decode images: return the media with uint8 pixels and statistics to normalise them; and errors by sample."""
        pixels, broken = self._tiles(inputs, decodes)
        assert isinstance(media, Images)
        return replace(media, values=pixels, statistics=self.data.normalization), broken

    def _tiles(self, shown: Sequence[Shown], decodes: bool) -> tuple[Tensor, Broken]:
        """Read uint8 [tiles, side, side, 3], with videos [tiles, FRAMES, side, side, 3]; and name images that cannot be
        read, whose tiles are black. Unless `decodes`, or if there are no tiles, it is a meta tensor."""
        side = self.side
        if not decodes or not shown:
            frames = (FRAMES,) if any(image.film for _, image, _ in shown) else ()
            shape = (sum(one.tiles for one in shown), *frames, side, side, 3)
            return torch.empty(shape, dtype=torch.uint8, device="meta"), {}

        def black(one: Shown) -> NDArray[np.uint8]:
            return np.zeros((one.tiles, *self._cut(one.image).shape[1:]), dtype=np.uint8)

        tiles, broken = read_each(shown, lambda one: self.decode(one.sample, one.image)[one.rows], black)
        return torch.from_numpy(join_tiles(tiles)), broken

    def pieces(self, samples: Sequence[Sample]) -> Pieces:
        """Return sizes of pieces: a tile each, or at native resolution the patches of an image or of a video's step."""
        return tuple((size,) for one in self.inputs(samples) for size in self._pieces(one.image))

    def share(self, samples: Sequence[Sample], pieces: Pieces, encodes: Sequence[bool]) -> tuple[Images, list[Shown]]:
        """Return the media of a rank that encodes some pieces (true in `encodes`), and their images and tiles."""
        here, shown, grids = iter(encodes), list[Shown](), list[tuple[int, int, int]]()
        for one in self.inputs(samples):
            sizes = self._pieces(one.image)
            mine = [next(here) for _ in sizes]
            if any(mine):
                shown.append(one._replace(rows=np.repeat(mine, sizes)))
                grids += compress(one.image.grids, mine) if self.data.rule.native else []
        return Images(pieces=pieces, encodes=tuple(encodes), grids=tuple(grids)), shown

    def _pieces(self, image: TiledImage) -> list[int]:
        """Return the number of tiles or patches of each piece of an image; one rank encodes a piece whole."""
        return [n * rows * columns for n, rows, columns in image.grids] if self.data.rule.native else [1] * image.tiles


def pixels_of(sample: Sample) -> Tensor:
    """Decode all tiles of a sample, normalised: float32 [tiles, 3, side, side], with videos [tiles, 3, FRAMES, ...].

    Raises as `InputReader.decode`.
    """
    reader = ImageReader(sample.data)
    return normalise(torch.from_numpy(reader.decode_all(sample)), sample.data.normalization)


def _video_tiles(root: Path, path: Path, video: TiledImage, size: int) -> NDArray[np.uint8]:
    """Decode a video file, or a list of frame files, to patches: uint8 [tiles, FRAMES, size, size, 3]."""
    assert video.film is not None
    if files := video.film.files:
        crcs = video.crcs or (None,) * len(files)
        frames = (np.asarray(load_rgb(root / file, crc=crc)) for file, crc in zip(files, crcs, strict=True))
        return cut_frames(frames, video, size)
    crc = video.crcs[0] if video.crcs else None
    return cut_frames(read_frames(path, video.place, video.film.frames, crc=crc), video, size)


def order_tensors(images: Iterable[tuple[int, FeatureOrder]]) -> dict[str, Any]:
    """Return the fields of `Images` that say which feature each token shows, from (features, order) of each image."""
    order = joined_orders(images)
    found: dict[str, Any] = {"sources": torch.from_numpy(order.sources)}
    return found if order.weights is None else found | {"weights": torch.from_numpy(order.weights)}
