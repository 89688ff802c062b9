"""Inputs that transformers' models take of the images and videos in a pack, by the names of their arguments.

image_sizes            height and width of every image; at native resolution also pixel_values [images, 3, H, W]
batch_num_images       how many images each sample has that has some
image_grid_thw         patches and grids of images and of videos; M-RoPE's positions
pixel_values           behind image_grid_thw: patches of one frame [patches, 3, size, size], row by row
image_position_ids     pixel_values [images, most patches, numbers]; column and row of each patch
pixel_attention_mask   pixel_values [1, tiles, 3, S, S]; no mask, as no tile is padded
token_type_ids,        attention_mask of each kind of layer [1, 1, T, T], where images are seen in both directions
mm_token_type_ids
pixel_values_videos    frames [videos, frames, 3, S, S] of videos that have an encoder of their own
input_features         mel frames [sounds, bins, most frames]; feature_attention_mask [sounds, most frames]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from megatron.vlm.models.vit.native import row_layout
from omnibal_ext.families.family import Packs
from omnibal_ext.families.media import TILINGS
from omnibal_ext.joining.masks import image_masks
from omnibal_ext.joining.pack_positions import pack_positions
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.vision.normalization import Normalization
from omnibal_ext.modalities.vision.tiling import FRAMES, SQUARE, TiledImage, TilingRule

Batch = dict[str, Any]
Samples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Pack:
    """A pack's samples, from a `ChatDataset`, for the model of a configuration."""

    samples: Samples
    words: Batch
    """Text inputs (`megatron.vlm.data.batches.join_words`)."""
    config: Any
    how: Packs
    normalization: Normalization
    """Mean and deviation of the samples' pixels."""

    @cached_property
    def ids(self) -> Tensor:
        """Token ids, int64 [T]."""
        ids: Tensor = self.words["input_ids"][0]
        return ids

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each sample."""
        return [len(sample["input_ids"]) for sample in self.samples]

    @cached_property
    def images(self) -> list[TiledImage]:
        """Images and videos of all samples."""
        return [image for sample in self.samples for image in sample["images"]]

    @property
    def grids(self) -> list[Grid]:
        """(steps, rows, columns) of each run of image and video tokens."""
        return [grid for image in self.images for grid in image.grids]

    @cached_property
    def pixels(self) -> Tensor:
        """Tiles [tiles, 3, S, S] of a pack that has some, and no videos."""
        return torch.cat([sample["pixel_values"] for sample in self.samples if len(sample["pixel_values"])])

    @property
    def rule(self) -> TilingRule:
        """Rule by which images are cut for the model."""
        return TILINGS[self.how.tiling]


def whole_images(patches: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Join patches [patches, 3, size, size] to images [images, 3, height, width], padded to the largest; also return
    each one's (height, width), as Pixtral's processor gives them."""
    size, pictures = patches.shape[-1], []
    for (_, rows, columns), part in zip(
        grids, patches.split([rows * columns for _, rows, columns in grids]), strict=True
    ):
        squares = part.view(rows // SQUARE, columns // SQUARE, SQUARE, SQUARE, 3, size, size)
        pictures.append(squares.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * size, columns * size))
    sizes = [(picture.shape[1], picture.shape[2]) for picture in pictures]
    height, width = map(max, zip(*sizes, strict=True))
    filled = [pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in pictures]
    return torch.stack(filled), sizes


def by_rows(patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Reorder patches [patches, 3, size, size]: each image's row by row instead of square by square."""
    found = []
    for (_, rows, columns), part in zip(
        grids, patches.split([rows * columns for _, rows, columns in grids]), strict=True
    ):
        squares = part.unflatten(0, (rows // SQUARE, columns // SQUARE, SQUARE, SQUARE))
        found.append(squares.transpose(1, 2).flatten(0, 3))
    return torch.cat(found)


def padded_patches(
    patches: Tensor, grids: Sequence[Grid], square: int, normalization: Normalization
) -> dict[str, Tensor]:
    """Give patches [patches, 3, size, size], in squares of `square` a side, as Gemma 4's processor does: pixel_values
    [images, most patches, numbers], from 0 to 1, and image_position_ids [images, most patches, 2], column, row or
    -1."""
    mean, deviation = (torch.tensor(one)[:, None, None] for one in normalization)
    counts = [rows * columns for _, rows, columns in grids]
    filled = torch.zeros(len(counts), max(counts), patches[0].numel())
    cells = torch.full((len(counts), max(counts), 2), -1)
    for number, part in enumerate(patches.split(counts)):
        filled[number, : len(part)] = (part * deviation + mean).permute(0, 2, 3, 1).flatten(1)
        rows_and_columns = row_layout((grids[number],), square, None).cells
        cells[number, : len(part)] = torch.from_numpy(rows_and_columns).flip(1)
    return {"pixel_values": filled, "image_position_ids": cells}


def _sizes(pack: Pack) -> Batch:
    if not pack.images:
        return {}
    if pack.rule.native:
        pictures, sizes = whole_images(pack.pixels, pack.grids)
        return {"pixel_values": pictures, "image_sizes": torch.tensor(sizes)}
    return {"image_sizes": torch.tensor([(image.height, image.width) for image in pack.images])}


def _counts(pack: Pack) -> Batch:
    """Return the number of images of each sample that has images; of several in a sample, each is one tile."""
    counts = [len(sample["images"]) for sample in pack.samples if sample["images"]]
    return {"batch_num_images": torch.tensor(counts)} if counts else {}


def _row_of_tiles(pack: Pack) -> Batch:
    return {"pixel_values": pack.pixels[None]} if pack.images else {}


def _placed_patches(pack: Pack) -> Batch:
    if not pack.images:
        return {}
    return padded_patches(pack.pixels, pack.grids, pack.rule.square, pack.normalization)


def _patches_and_grids(pack: Pack) -> Batch:
    """Return patches, grids and `position_ids` [4, 1, T]: in the sample, then M-RoPE's three."""
    found: Batch = {}
    shown = [media for sample in pack.samples for media in _media_of(sample)]
    for name, pixels, film in (("image", "pixel_values", False), ("video", "pixel_values_videos", True)):
        parts = [media for media in shown if _is_film(media[0], pack.how) is film]
        if parts:
            found[pixels] = torch.cat([patches for _, patches in parts])
            found[f"{name}_grid_thw"] = torch.tensor([grid for image, _ in parts for grid in image.grids])
    films = [(image.film, image.grids) for image, _ in shown if image.film and _is_film(image, pack.how)]
    seconds = [film.seconds for film, steps in films for _ in steps]
    bounds = np.cumsum([0, *pack.lengths])
    grids = (found.get("image_grid_thw"), found.get("video_grid_thw"))
    cells = pack_positions(pack.config, pack.ids, bounds, *grids, seconds)[:, None]
    return {**found, "position_ids": torch.cat([pack.words["position_ids"][None], cells])}


def _rows_of_patches(pack: Pack) -> Batch:
    return {"pixel_values": by_rows(pack.pixels, pack.grids)} if pack.images else {}


def _is_film(image: TiledImage, how: Packs) -> bool:
    return image.film is not None and not how.videos_as_images


def _media_of(sample: Mapping[str, Any]) -> list[tuple[TiledImage, Tensor]]:
    """Return a sample's images and videos, each with its patches [patches, 3 x frames x size x size]."""
    pixels: Tensor = sample["pixel_values"]
    if pixels.dim() == 4:  # an image's frames are equal ones
        pixels = pixels.unsqueeze(2).expand(-1, -1, FRAMES, -1, -1)
    patches = pixels.flatten(1).split([image.tiles for image in sample["images"]])
    return list(zip(sample["images"], patches, strict=True))


def _masks(pack: Pack) -> Batch:
    """Return masks of each kind of layer, if images are seen in both directions."""
    masks = image_masks(pack.config, pack.ids.numpy(), pack.lengths)
    return {"attention_mask": {kind: torch.from_numpy(mask) for kind, mask in masks.items()}} if masks else {}


def padded_sounds(sounds: Sequence[Tensor]) -> Batch:
    """Pad mel frames [frames, bins] of sounds as Whisper's feature extractor does: input_features [sounds, bins, most
    frames], and feature_attention_mask [sounds, most frames]; {} for none.

    In Qwen3-Omni this padding changes what a sound of under a second becomes, if a longer one is in the batch.
    """
    if not sounds:
        return {}
    lengths = torch.tensor([len(mels) for mels in sounds])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    features = pad_sequence(list(sounds), batch_first=True).mT
    return {"input_features": features, "feature_attention_mask": inside.long()}


def _heard(pack: Pack) -> Batch:
    heard = [one for one in pack.samples if len(one["feature_lengths"])]
    parts = (one["input_features"].split(one["feature_lengths"].tolist()) for one in heard)
    return padded_sounds([mels for part in parts for mels in part])


def _films(pack: Pack) -> Batch:
    """Return videos that have an encoder of their own; all have the same number of frames."""
    films = [one["pixel_values_videos"] for one in pack.samples if len(one["pixel_values_videos"])]
    return {"pixel_values_videos": torch.cat(films)} if films else {}


INPUTS: dict[str, Callable[[Pack], Batch]] = {
    "input_features": _heard,
    "pixel_values_videos": _films,
    "image_sizes": _sizes,
    "batch_num_images": _counts,
    "image_grid_thw": _patches_and_grids,
    "position_ids": lambda _: {},  # which come with the grids
    "pixel_values": _rows_of_patches,
    "image_position_ids": _placed_patches,
    "pixel_attention_mask": _row_of_tiles,
    "token_type_ids": _masks,
    "mm_token_type_ids": _masks,  # of which other models only compute positions, which packs have
}
"""Functions that make the inputs in `Model.takes` from a pack."""
