"""The images of a pack as units that ranks can encode separately: each image, and each temporal step of a video."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.tiling import SQUARE
from megatron.vlm.microbatch import Grid


@dataclass(frozen=True)
class SampleTiles:
    """Which tiles of a sample to read."""

    sample: int
    steps: tuple[tuple[int, ...], ...] | None
    """The steps of each of its images; None: all."""
    tiles: int
    film: bool = False
    """Whether one of them is a video."""


@dataclass(frozen=True)
class ImageStep:
    """An image, or one temporal step of a video."""

    sample: int
    image: int
    number: int
    tiles: int
    features: int
    grid: Grid
    film: bool


class PackImages(tuple[ImageStep, ...]):
    """The steps of all images of a pack, in order."""

    @classmethod
    def of(cls, data: ChatDataset, samples: Iterable[int]) -> "PackImages":
        """For these samples of a dataset."""
        each = SQUARE**-2 if data.rule.native else data.manifest["tokens_per_tile"]
        found = []
        for sample in map(int, samples):
            for number, image in enumerate(data.images(sample) if data.sizes.tiles[sample] else ()):
                tiles = image.tiles // image.steps
                grid = (1, image.rows, image.columns)
                found += [
                    ImageStep(sample, number, step, tiles, int(tiles * each), grid, image.film is not None)
                    for step in range(image.steps)
                ]
        return cls(found)

    @property
    def tiles(self) -> NDArray[np.int64]:
        """[steps]"""
        return np.array([step.tiles for step in self], np.int64)

    @property
    def features(self) -> NDArray[np.int64]:
        """[steps] Outputs of the encoder, before tiles are joined."""
        return np.array([step.features for step in self], np.int64)

    def subset(self, mine: NDArray[np.bool_]) -> "PackImages":
        """The steps where `mine` is true."""
        return PackImages(step for step, is_mine in zip(self, mine, strict=True) if is_mine)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Consecutive steps of one video make one grid."""
        films = groupby(self, key=lambda step: (step.sample, step.image, step.grid))
        return tuple((len(list(steps)), rows, columns) for (*_, (_, rows, columns)), steps in films)

    @property
    def tiles_to_read(self) -> list[SampleTiles]:
        """What to read of each sample."""
        found = []
        for sample, of_sample in groupby(self, key=lambda step: step.sample):
            steps = list(of_sample)
            images = range(1 + steps[-1].image)
            numbers = tuple(tuple(step.number for step in steps if step.image == image) for image in images)
            film = any(step.film for step in steps)
            found.append(SampleTiles(sample, numbers, sum(step.tiles for step in steps), film))
        return found
