"""What a rank reads of a pack whose images several ranks encode: its units' pixels, and the sizes of all units."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.tiling import FRAMES, TiledImage
from megatron.vlm.data.media.videos import join_tiles
from megatron.vlm.microbatch import Grid, Microbatch
from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.tower_encoding import EncoderRank


@dataclass(frozen=True)
class NumberedPacks:
    """(pack number, microbatch of its iteration) for a sequence of packs."""

    packs: Iterable[int]
    microbatches: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.packs, cycle(range(self.microbatches)), strict=False)


class ImageShardDataset(Dataset):
    """(Pack number, microbatch) -> Microbatch with this rank's images, uint8 on the host.

    `units` has the sizes of all units of the pack; `tiles`, `grids` and `pixels` are this rank's only.
    """

    reads_images = True

    def __init__(self, data: ChatDataset, index: PackedIndex, worker: EncoderRank) -> None:
        self.data, self.index, self.worker = data, index, worker

    def __getitem__(self, place: tuple[int, int]) -> Microbatch:
        pack, microbatch = place
        samples = self.index.samples(pack).tolist() if pack >= 0 else []
        shown = [
            (sample, image) for sample in samples if self.data.sizes.tiles[sample] for image in self.data.images(sample)
        ]
        sizes = [self._units(image) for _, image in shown]
        units = tuple(size for each in sizes for size in each)
        taken = self.worker.takes(units, microbatch)
        takes = iter(taken)
        own = [[next(takes) for _ in each] for each in sizes]
        read = [
            self._read(sample, image, np.repeat(mine, each))
            for (sample, image), each, mine in zip(shown, sizes, own, strict=True)
            if any(mine)
        ]
        grids = [
            grid
            for (_, image), mine in zip(shown, own, strict=True)
            for grid, one in zip(self._grids(image), mine, strict=False)
            if one
        ]
        return Microbatch(
            tiles=sum(len(pixels) for pixels, _ in read),
            lengths=(),
            samples=len(samples),
            useful_tokens=0,
            pixels=torch.from_numpy(join_tiles([pixels for pixels, _ in read])) if read else None,
            pixel_statistics=self.data.normalization,
            pack=pack,
            sample_ids=tuple(samples),
            broken=tuple(dict(why for _, why in read if why is not None).items()),
            grids=tuple(grids),
            units=units,
            encodes=tuple(taken),
        )

    def _read(
        self, sample: int, image: TiledImage, rows: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint8], tuple[int, str] | None]:
        """The chosen tiles of an image; black ones and (sample, error) if it cannot be read."""
        try:
            return self.data.image_tiles(sample, image)[rows], None
        except UserError as error:
            size, frames = self.data.manifest["tile_size"], (FRAMES,) if image.film else ()
            return np.zeros((int(rows.sum()), *frames, size, size, 3), dtype=np.uint8), (sample, str(error))

    def _grids(self, image: TiledImage) -> list[Grid]:
        return image.grids if self.data.rule.native else []

    def _units(self, image: TiledImage) -> list[int]:
        return [steps * rows * columns for steps, rows, columns in self._grids(image)] or [1] * image.tiles
