"""A ViT that sees images at their own size (Qwen2-VL, Qwen2.5-VL): patches of all images of a pack, one row each.

    image of 4 x 6 patches         rows: squares of 2 x 2 patches, which become one token of the language model
     0  1 |  4  5 |  8  9
     2  3 |  6  7 | 10 11          positions of rows: 0 (0,0), 1 (0,1), 2 (1,0), 3 (1,1), 4 (0,2), ...
    ------+-------+------
    12 13 | 16 17 | 20 21          windows: with a window of 2 x 2 squares the squares are ordered 0 1 3 4 | 2 5
    14 15 | 18 19 | 22 23

Query and key are rotated by row (half of the frequencies) and column (the other half). Attention stays inside a frame
of an image, and where the model has windows, inside a window in all but the layers it names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import gelu, linear

from megatron.vlm import platform
from megatron.vlm.microbatch import Grid, Microbatch, Segments, segments_of
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vision import join_rows, share_rows, shared_rows
from omnibal_ext.architectures.architecture import Architecture, VisionArchitecture

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of a pack's images are, on the host."""

    order: Ints  # [squares], squares as the ViT sees them: window by window
    places: Ints  # [patches, 2], row and column in its image of each patch, in the ViT's order
    frames: tuple[int, ...]  # patches of every frame
    windows: tuple[int, ...]  # patches of every window; frames where the model has none


@lru_cache(maxsize=64)
def row_layout(grids: tuple[Grid, ...], merge: int, window: int | None) -> RowLayout:
    """The rows of images of (frames, rows, columns) patches; a window is `window` squares a side."""
    orders, places, frames, windows, first = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)], [], [], 0
    for count, rows, columns in grids:
        squares = np.arange(count * rows * columns // merge**2).reshape(count, rows // merge, columns // merge)
        blocks = _blocks(squares, window) if window else [frame.ravel() for frame in squares]
        order = np.concatenate(blocks)
        orders.append(first + order)
        places.append(np.tile(_places(rows, columns, merge), (count, 1, 1))[order].reshape(-1, 2))
        frames += [rows * columns] * count
        windows += [len(block) * merge**2 for block in blocks]
        first += squares.size
    return RowLayout(np.concatenate(orders), np.concatenate(places), tuple(frames), tuple(windows))


def _blocks(squares: Ints, window: int) -> list[Ints]:
    """Numbers of squares [frames, rows, columns], window by window."""
    _, rows, columns = squares.shape
    return [
        frame[top : top + window, left : left + window].ravel()
        for frame in squares
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]


def _places(rows: int, columns: int, merge: int) -> Ints:
    """Row and column of every patch of a frame, [squares, merge^2, 2]."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    squares = grid.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return squares.reshape(-1, merge**2, 2)


@dataclass(frozen=True)
class View:
    """What the ViT's links need to know of a pack's images, on the device."""

    patch_order: Tensor | None  # [patches], None where the order is the loader's
    square_places: Tensor | None  # [squares], where each square of the images is among the ViT's
    rotary: Tensor  # [rows, 1, 1, head width], rows that fill up included
    whole: Segments
    windows: Segments


class Viewer(torch.nn.Module):
    """Makes the `View` of a pack."""

    def __init__(self, vision: VisionArchitecture, config: TransformerConfig) -> None:
        super().__init__()
        assert vision.native is not None
        self.native, self.config = vision.native, config
        width = vision.hidden_size // vision.heads // 2
        # No buffer: a model in half precision would round it.
        self.frequencies = 1.0 / self.native.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def forward(self, batch: Microbatch) -> View:
        """Order, rotation and segments of the pack's patches."""
        layout = row_layout(batch.grids, self.native.merge, self.native.window)
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        missing = shared_rows(batch.tiles, self.config) * ranks - batch.tiles
        order, back = self._orders(layout.order) if self.native.window else (None, None)
        angles = torch.from_numpy(layout.places)[..., None].float() * self.frequencies  # [patches, 2, width / 4]
        angles = torch.cat([angles.flatten(1)] * 2, dim=-1)
        angles = torch.nn.functional.pad(angles, (0, 0, 0, missing))[:, None, None, :]
        filler = (missing,) if missing else ()
        return View(
            order,
            back,
            platform.to_device(angles),
            segments_of((*layout.frames, *filler), causal=False),
            segments_of((*layout.windows, *filler), causal=False),
        )

    def _orders(self, order: Ints) -> tuple[Tensor, Tensor]:
        squares = torch.from_numpy(order)
        patches = squares[:, None] * self.native.merge**2 + torch.arange(self.native.merge**2)
        return platform.to_device(patches.flatten()), platform.to_device(torch.argsort(squares))


class NativePatchEmbed(MegatronModule):
    """Patches to ViT tokens; an image is a film of equal frames. pixels [patches, 3, size, size] -> rows."""

    def __init__(self, config: TransformerConfig, architecture: VisionArchitecture) -> None:
        super().__init__(config)
        assert architecture.native is not None
        self.frames, size = architecture.native.frames, architecture.patch_size
        kernel = (self.frames, size, size)
        self.projection = torch.nn.Conv3d(
            3, architecture.hidden_size, kernel, stride=kernel, bias=architecture.patch_bias, dtype=config.params_dtype
        )
        config.init_method(self.projection.weight.data)
        if self.projection.bias is not None:
            torch.nn.init.zeros_(self.projection.bias)

    def forward(self, hidden: None, batch: Microbatch, view: View) -> Tensor:
        """Pixels of the pack's patches -> rows in the ViT's order, this rank's share."""
        assert batch.pixels is not None
        weight = self.projection.weight
        film = batch.pixels.to(weight.dtype).unsqueeze(2).expand(-1, -1, self.frames, -1, -1)
        rows = linear(film.flatten(1), weight.flatten(1), self.projection.bias)  # the kernel covers a patch once
        rows = rows if view.patch_order is None else rows[view.patch_order]
        return share_rows(rows.unsqueeze(1), self.config)


class PatchMerger(MegatronModule):
    """Each square of patches -> one token of the language model, in the order of the images."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, vision = vision, self.config
        self.width = vision.hidden_size * architecture.shuffle**2
        options = {"config": vision, "init_method": vision.init_method, "bias": True}
        self.norm = build_norm(vision, vision.hidden_size, vision.layernorm_epsilon)
        self.linear_fc1 = ColumnParallelLinear(self.width, self.width, gather_output=False, **options)
        self.linear_fc2 = RowParallelLinear(
            self.width, language.hidden_size, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, hidden: Tensor, batch: Microbatch, view: View) -> Tensor:
        """This rank's rows -> image tokens [tokens, 1, LLM width]."""
        rows = join_rows(hidden, batch.tiles, self.shared)
        inner, _ = self.linear_fc1(self.norm(rows).view(-1, 1, self.width))
        out, _ = self.linear_fc2(gelu(inner))
        return out if view.square_places is None else out[view.square_places]


def text_and_image_positions(
    lengths: Sequence[int], grids: Sequence[Grid], starts: Sequence[int], merge: int
) -> NDArray[np.int64]:
    """Time, row and column of every token of a pack, counted inside its sample: int64 [3, T] (M-RoPE, 2409.12191).

    A word is one step on all three axes. An image's tokens stand at its beginning in time, and at their rows and
    columns from there; what follows goes on behind its longer side. `starts` are where images' tokens begin in the
    pack.
    """
    positions = np.zeros((3, sum(lengths)), np.int64)
    images, begin = list(zip(starts, grids, strict=True)), 0
    for length in lengths:
        at, now = begin, 0
        while images and images[0][0] < begin + length:
            start, (frames, rows, columns) = images.pop(0)
            rows, columns = rows // merge, columns // merge
            positions[:, at:start] = np.arange(now, now + start - at)
            now += start - at
            at = start + frames * rows * columns
            positions[:, start:at] = now + np.indices((frames, rows, columns)).reshape(3, -1)
            now += max(rows, columns)
        positions[:, at : begin + length] = np.arange(now, now + begin + length - at)
        begin += length
    return positions
