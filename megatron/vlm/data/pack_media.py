"""The tiles and mel frames of a pack's images and sounds, with placeholders for those that cannot be read."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.dataset import Sample
from megatron.vlm.data.media.videos import join_tiles
from omnibal_ext.errors import UserError
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


Broken = tuple[tuple[int, str], ...]
"""(sample, error) of those of which an image or a sound cannot be decoded."""


def read_tiles(shown: Sequence[Shown], size: int, decodes: bool = True) -> tuple[Tensor, Broken]:
    """uint8 [tiles, size, size, 3], with videos [tiles, FRAMES, size, size, 3], and (sample, error) of images that
    cannot be read: their tiles are black. Unless `decodes`, and without tiles, it is a meta tensor.
    """
    if not decodes or not shown:
        frames = (FRAMES,) if any(image.film for _, image, _ in shown) else ()
        shape = (sum(one.tiles for one in shown), *frames, size, size, 3)
        return torch.empty(shape, dtype=torch.uint8, device="meta"), ()
    tiles, broken = [], dict[int, str]()
    for one in shown:
        try:
            tiles.append(one.sample.read(one.image)[one.rows])
        except UserError as error:
            broken.setdefault(one.sample.number, str(error))
            frames = (FRAMES,) if one.image.film else ()  # the other ranks expect this shape
            tiles.append(np.zeros((one.tiles, *frames, size, size, 3), dtype=np.uint8))
    return torch.from_numpy(join_tiles(tiles)), tuple(broken.items())


def all_broken(images: Broken, sounds: Broken) -> Broken:
    """Return each sample once, with the error of its images if it has two."""
    return tuple({**dict(sounds), **dict(images)}.items())


def read_mels(samples: Sequence[Sample], bins: int, decodes: bool = True) -> tuple[Tensor, Broken]:
    """fp32 [frames, bins] of all sounds of these samples, and (sample, error) of sounds that cannot be decoded: their
    frames are zeros. Unless `decodes`, and without frames, it is a meta tensor.
    """
    frames = sum(sample.frames for sample in samples)
    if not decodes or not frames:
        return torch.empty(frames, bins, device="meta"), ()
    mels, broken = [], dict[int, str]()
    for sample in samples:
        for sound in sample.sounds:
            try:
                mels.append(sample.hear(sound))
            except UserError as error:
                broken.setdefault(sample.number, str(error))
                mels.append(torch.zeros(sound.frames, bins))  # the other ranks expect this shape
    return torch.cat(mels), tuple(broken.items())


def order_tensors(images: Iterable[tuple[int, FeatureOrder]]) -> dict[str, Any]:
    """`joined_orders` as fields of a `Microbatch`."""
    order = joined_orders(images)
    found: dict[str, Any] = {"image_sources": torch.from_numpy(order.sources)}
    return found if order.weights is None else found | {"image_weights": torch.from_numpy(order.weights)}
