"""What a rank reads of a pack that several ranks encode: its units' pixels and mel frames, and all units' sizes."""

from collections.abc import Iterable, Iterator
from itertools import chain, compress, cycle

import numpy as np
from torch.utils.data import Dataset

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import sounds_of
from megatron.vlm.data.pack_media import Shown, all_broken, read_mels, read_tiles
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.image_assignment import EncoderRank, unit_costs
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.vision.tiling import TiledImage
from omnibal_ext.packing.index.packed_index import PackedIndex


def numbered(packs: Iterable[int], microbatches: int) -> Iterator[tuple[int, int]]:
    """(pack number, microbatch of its iteration) for a sequence of packs."""
    return zip(packs, cycle(range(microbatches)), strict=False)


class ImageShardDataset(Dataset):
    """(Pack number, microbatch) -> Microbatch with this rank's images, uint8 on the host, and sounds.

    `units` and `heard` have the sizes of all units of the pack; `tiles`, `grids`, `pixels`, `sounds` and `mels` are
    this rank's only.
    """

    reads_images = True

    def __init__(self, data: ChatDataset, index: PackedIndex, worker: EncoderRank) -> None:
        self.data, self.index, self.worker = data, index, worker

    def __getitem__(self, place: tuple[int, int]) -> Microbatch:
        pack, microbatch = place
        samples = [*map(self.data.sample, self.index.samples(pack))] if pack >= 0 else []
        sees, hears = (size in self.worker.sizes for size in ("tiles", "frames"))
        images = [(sample, image) for sample in samples if sees and sample.tiles for image in sample.images]
        sizes = [self._units(image) for _, image in images]
        units, heard = tuple(chain.from_iterable(sizes)), sounds_of(samples) if hears else ()
        takes = self.worker.takes(unit_costs(units, heard, self.worker.tiles_per_frame), microbatch)
        encodes, hears_here = takes[: len(units)], takes[len(units) :]
        here, shown, grids = iter(encodes), list[Shown](), list[Grid]()
        for (sample, image), each in zip(images, sizes, strict=True):
            mine = [next(here) for _ in each]
            if any(mine):
                shown.append(Shown(sample, image, np.repeat(mine, each)))
                grids += compress(image.grids, mine) if self.data.rule.native else []
        pixels, broken = read_tiles(shown, self.data.manifest["tile_size"]) if shown else (None, ())
        heard_here = [*compress(samples, hears_here)]
        rule = self.data.sound_rule
        mels, silent = read_mels(heard_here, rule.encoder.mel_bins) if rule else (None, ())
        return Microbatch(
            tiles=sum(one.tiles for one in shown),
            lengths=(),
            samples=len(samples),
            useful_tokens=0,
            pixels=pixels,
            pixel_statistics=self.data.normalization,
            pack=pack,
            sample_ids=tuple(sample.number for sample in samples),
            broken=all_broken(broken, silent),
            grids=tuple(grids),
            units=units,
            encodes=tuple(encodes),
            sounds=tuple(frames if own else () for frames, own in zip(heard, hears_here, strict=True)),
            mels=mels,
            heard=heard,
        )

    def _units(self, image: TiledImage) -> list[int]:
        """Tiles or patches of each part of an image that is encoded on one rank."""
        return [n * rows * columns for n, rows, columns in image.grids] if self.data.rule.native else [1] * image.tiles
