"""Videos of a pack that have an encoder of their own: a tile for each frame, black where a video cannot be read."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from megatron.vlm.data.inputs.reader import Broken, Cut, InputReader, read_each
from megatron.vlm.data.media.images import load_rgb
from megatron.vlm.data.media.videos import read_frames, require_decoder
from megatron.vlm.data.sample import Sample
from megatron.vlm.media import Images, Media
from megatron.vlm.pixels import normalise
from omnibal_ext.families.media import TILINGS
from omnibal_ext.image_assignment import Pieces
from omnibal_ext.modalities.film.architecture import Film, FilmRule
from omnibal_ext.modalities.modality import FILM
from omnibal_ext.modalities.vision.tiling import TiledImage


class FilmReader(InputReader):
    """Videos: frames as tiles, uint8 [frames, side, side, 3]. A video is a piece."""

    modality = FILM

    def require(self) -> None:
        """Raise UserError naming what to install if the dataset has video files and no decoder is installed."""
        if self.data.manifest.get("video_files"):
            require_decoder(str(self.data.folder))

    @property
    def rule(self) -> FilmRule:
        """Rule of the dataset for its videos: how many frames are seen, the side of their tiles, and tokens."""
        rule = self.data.further_rules[FILM]
        assert isinstance(rule, FilmRule)
        return rule

    @property
    def side(self) -> int:
        """Side of a tile in pixels."""
        return self.rule.side

    def _cut(self, item: Film) -> Cut:
        """Return how a video is cut: a tile each frame, [frames, side, side, 3]."""
        return Cut(self.rule.tiling, (item.units, self.side, self.side, 3))

    def _decoded(self, root: Path, path: Path, item: Film) -> NDArray[np.uint8]:
        rule, plan = TILINGS[self.rule.tiling], TiledImage(item.path, 1, 1, False)
        return np.concatenate([rule.cut(frame, plan, self.side) for frame in _frames(root, path, item)])

    def values(self, sample: Sample, item: Film) -> Tensor:
        """Decode a video, normalised: fp32 [frames, 3, side, side]. Raises as `decode`."""
        return normalise(torch.from_numpy(self.decode(sample, item)), self.data.normalization)

    def decode_all(self, sample: Sample) -> NDArray[np.uint8]:
        """Decode all videos of a sample: uint8 [frames, side, side, 3]."""
        nothing = np.zeros((0, self.side, self.side, 3), np.uint8)
        return np.concatenate([nothing, *(self.decode(sample, film) for film in sample.items(FILM))])

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """Return pixel_values_videos fp32 [videos, frames, 3, side, side]."""
        pixels = normalise(torch.from_numpy(self.decode_all(sample)), self.data.normalization)
        return {"pixel_values_videos": pixels.unflatten(0, (-1, self.rule.frames))}

    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Images:
        """Return a pack's videos without pixels: the number of frames of each."""
        return Images(self.pieces(samples))

    def pieces(self, samples: Sequence[Sample]) -> Pieces:
        """Return a piece for each video."""
        return tuple((one.item.units,) for one in self.inputs(samples))

    def share(self, samples: Sequence[Sample], pieces: Pieces, encodes: Sequence[bool]) -> tuple[Images, list[Any]]:
        """Return the media of a rank that encodes some videos (true in `encodes`), and these videos, to be decoded."""
        inputs = [one for one, mine in zip(self.inputs(samples), encodes, strict=True) if mine]
        return Images(pieces, tuple(encodes)), inputs

    def read(self, media: Media, inputs: Sequence[Any], decodes: bool = True) -> tuple[Media, Broken]:
        """Decode videos: return the media with uint8 pixels and statistics to normalise them; and errors by sample."""
        assert isinstance(media, Images)
        tiles, broken = read_each(
            inputs if decodes else (),
            lambda one: self.decode(*one),
            lambda one: np.zeros(self._cut(one.item).shape, np.uint8),
        )
        meta = torch.empty(media.amount, self.side, self.side, 3, dtype=torch.uint8, device="meta")
        values = torch.from_numpy(np.concatenate(tiles)) if tiles else meta
        return replace(media, values=values, statistics=self.data.normalization), broken


def _frames(root: Path, path: Path, film: Film) -> Iterator[Image.Image]:
    """Yield the frames of a video file, or of a list of frame files; one that is seen again is decoded once."""
    if film.files:
        crcs = film.crcs or (None,) * len(film.files)
        for (file, crc), again in groupby(zip(film.files, crcs, strict=True)):
            frame = load_rgb(root / file, crc=crc)
            yield from (frame for _ in again)
    else:
        times, crc = Counter(film.frames), film.crcs[0] if film.crcs else None
        for pixels, count in zip(read_frames(path, film.place, [*times], crc=crc), times.values(), strict=True):
            yield from [Image.fromarray(pixels)] * count
