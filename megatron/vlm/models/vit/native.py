"""A ViT at native resolution (Qwen2-VL to Qwen3-VL): the patches of all images of a pack, one row each.

    image of 4 x 6 patches         rows: squares of 2 x 2 patches, which become one token of the language model
     0  1 |  4  5 |  8  9
     2  3 |  6  7 | 10 11          positions of rows: 0 (0,0), 1 (0,1), 2 (1,0), 3 (1,1), 4 (0,2), ...
    ------+-------+------
    12 13 | 16 17 | 20 21          windows: with a window of 2 x 2 squares the squares are ordered 0 1 3 4 | 2 5
    14 15 | 18 19 | 22 23

Query and key are rotated by row (half of the frequencies) and column (the other half). Qwen3-VL also has learned
positions: a square of them, interpolated over each image. A video is a sequence of steps, each of as many frames as a
patch has; an image is one step of equal frames. Attention is within a step and, in models with windows, within a window
in all layers but the full-attention ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from megatron.vlm import platform
from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch, Segments, segments_of
from megatron.vlm.models.attention.rotation import rotation
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import missing_rows, share_rows
from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.modality import Size
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture


@dataclass(frozen=True)
class RowLayout:
    """Order and positions of a pack's patches, on the host."""

    order: Ints  # [squares], squares as the ViT sees them: window by window
    cells: Ints  # [patches, 2], row and column in its image of each patch, in the ViT's order
    sizes: Ints  # [patches, 2], rows and columns of the image that it is of
    frames: tuple[int, ...]  # patches of every step in time
    windows: tuple[int, ...]  # patches of every window; steps where the model has none


@lru_cache(maxsize=64)
def row_layout(grids: tuple[Grid, ...], merge: int, window: int | None) -> RowLayout:
    """Order patches of images (steps, rows, columns): by windows of `window` squares, squares of `merge` patches."""
    nothing = np.zeros((0, 2), np.int64)
    orders, cells, sizes, frames, windows, first = [nothing[:, 0]], [nothing], [nothing], [], [], 0
    for count, rows, columns in grids:
        squares = np.arange(count * rows * columns // merge**2).reshape(count, rows // merge, columns // merge)
        blocks = _blocks(squares, window) if window else [frame.ravel() for frame in squares]
        order = np.concatenate(blocks)
        orders.append(first + order)
        cells.append(np.tile(_cells(rows, columns, merge), (count, 1, 1))[order].reshape(-1, 2))
        sizes.append(np.tile(np.array([[rows, columns]], np.int64), (count * rows * columns, 1)))
        frames += [rows * columns] * count
        windows += [len(block) * merge**2 for block in blocks]
        first += squares.size
    order, position, size = (np.concatenate(parts) for parts in (orders, cells, sizes))
    return RowLayout(order, position, size, tuple(frames), tuple(windows))


def _blocks(squares: Ints, window: int) -> list[Ints]:
    """Return the numbers of squares [steps, rows, columns], window by window."""
    _, rows, columns = squares.shape
    return [
        frame[top : top + window, left : left + window].ravel()
        for frame in squares
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]


def _cells(rows: int, columns: int, merge: int) -> Ints:
    """Return row and column of each patch of an image or a video's step, square by square: int64 [squares, merge^2, 2].

    `rows` and `columns` count patches.
    """
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    squares = grid.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return squares.reshape(-1, merge**2, 2)


def stretched_positions(cells: Tensor, sizes: Tensor, side: int, edges: bool = False) -> tuple[Tensor, Tensor]:
    """Interpolate `side` x `side` learned positions over each image: bilinear, corners aligned, or edges (`edges`).

    cells and sizes int64 [patches, 2] -> the four positions around each patch int64 [patches, 4], and their weights
    fp32.
    """
    at = cells.float() * (side - 1) / (sizes - 1).clamp(min=1).float()
    if edges:
        at = (cells.float() + 0.5) * side / sizes.float() - 0.5
    low = at.floor().long()
    rest = at - low.float()
    return _products([(low.clamp(min=0), 1 - rest), ((low + 1).clamp(max=side - 1), rest)], side)


CUBIC = -0.75
"""Parameter a of the bicubic kernel (Keys, 1981), as in torch."""


def bicubic_positions(cells: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Interpolate as `stretched_positions`, bicubic, edges aligned: positions int64 [patches, 16], and weights.

    Positions beyond an edge are those of the edge (torch's grid_sample, border).
    """
    turned = (cells.float() + 0.5) / sizes.float() * 2 - 1
    at = ((turned + 1) * side - 1) / 2
    low = at.floor()
    rest = at - low
    around = [((low.long() + step).clamp(0, side - 1), _cubic_share((rest - step).abs())) for step in (-1, 0, 1, 2)]
    return _products(around, side)


def _products(around: Sequence[tuple[Tensor, Tensor]], side: int) -> tuple[Tensor, Tensor]:
    """Pair every row with every column: (position, weight) of both axes [patches, 2] -> those of the square."""
    corners = [
        (rows[:, 0] * side + columns[:, 1], row_shares[:, 0] * column_shares[:, 1])
        for rows, row_shares in around
        for columns, column_shares in around
    ]
    return torch.stack([position for position, _ in corners], 1), torch.stack([weight for _, weight in corners], 1)


def _cubic_share(distance: Tensor) -> Tensor:
    """Return the weight of a position at this distance (Keys, 1981)."""
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, far)


@dataclass(frozen=True)
class View:
    """Order and segments of a pack's images or sounds, on the device, for an encoder's layers."""

    patch_order: Tensor | None  # [patches], None where the order is the loader's
    square_places: Tensor | None  # [squares], where each square of the images is among the ViT's
    whole: Segments  # rows that fill up included
    windows: Segments


class RowViewer(torch.nn.Module):
    """A module that makes the `View` of a pack's inputs that have no grid, such as sounds."""

    def __init__(self, config: TransformerConfig, size: Size, windows: Callable[[int], Sequence[int]]) -> None:
        """Keep `windows`: for an input of so many units of `size`, the numbers of rows that attend to each other."""
        super().__init__()
        self.config, self.size, self.windows = config, size, windows

    def forward(self, batch: Microbatch) -> View:
        """Return segments of the pack's rows: those of a window attend to each other."""
        lengths = [rows for units in batch.media_of(self.size).inputs for rows in self.windows(units)]
        missing = missing_rows(sum(lengths), self.config)
        segments = segments_of((*lengths, missing) if missing else lengths, causal=False)
        return View(None, None, segments, segments)


class Viewer(torch.nn.Module):
    """A module that makes the `View` of a pack's images at native resolution."""

    def __init__(self, vision: VisionArchitecture, config: TransformerConfig) -> None:
        super().__init__()
        assert vision.native is not None
        self.native, self.config = vision.native, config
        width = vision.hidden_size // vision.heads // 2
        # No buffer: a model in half precision would round it.
        self.frequencies = axis_frequencies(self.native, width)

    def forward(self, batch: Microbatch) -> View:
        """Return order, rotation and segments of the pack's patches."""
        images = Images.of(batch)
        layout = row_layout(images.grids, self.native.merge, self.native.window)
        missing = missing_rows(images.amount, self.config)
        order, back = self._orders(layout.order) if self.native.window else (None, None)
        angles = self._angles(platform.to_device(torch.from_numpy(layout.cells)), missing)
        turn, filler = rotation(angles, self.config.params_dtype), (missing,) if missing else ()
        whole, windows = (
            segments_of((*lengths, *filler), causal=False, rotation=turn) for lengths in (layout.frames, layout.windows)
        )
        return View(order, back, whole, windows)

    def _angles(self, cells: Tensor, missing: int) -> Tensor:
        """Return angles of every patch, [patches, 1, 1, width of a head], or by halves [patches, 1, 1, 2, width / 2];
        zero for `missing` padding rows. On the device: on a host with 16 threads they took up to 30 ms a pack."""
        self.frequencies = platform.once_on(cells.device, self.frequencies)
        angles = cells[..., None].float() * self.frequencies  # [patches, 2, width / 4]
        angles = angles.flip(1) if self.native.by_halves else angles.flatten(1)
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        return torch.cat([angles, angles.new_zeros(missing, *angles.shape[1:])])

    def _orders(self, order: Ints) -> tuple[Tensor, Tensor]:
        squares = platform.to_device(torch.from_numpy(order))
        patches = squares[:, None] * self.native.merge**2 + torch.arange(self.native.merge**2, device=squares.device)
        return patches.flatten(), torch.argsort(squares)


def axis_frequencies(native: NativeResolution, width: int) -> Tensor:
    """Return radians per row and per column, fp32 [2, width / 2]; `width` numbers of a head are rotated by each."""
    steps = torch.arange(0, width, 2, dtype=torch.float32)
    columns = steps + 1 if native.columns_between else steps
    return 1.0 / native.theta ** (torch.stack([steps, columns]) / width)


def _weighted_sums(table: Tensor, cells: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted rows of a table: `cells`, `weights` [all], first of each sum `begins` [sums] -> [sums, width]."""
    return embedding_bag(cells, table, begins, per_sample_weights=weights, mode="sum")


class PatchProjection(torch.nn.Conv3d):
    """A convolution with one position per patch: a matrix product, [patches, 3, frames, size, size] -> rows.

    It is a module, so that Megatron's hook waits for its weights before it is called.
    """

    def forward(self, film: Tensor) -> Tensor:
        """Map [patches, 3, frames, size, size] to [patches, width]."""
        return linear(film.flatten(1), self.weight.flatten(1), self.bias)


class NativePatchEmbed(MegatronModule):
    """The layer from patches to ViT tokens; an image is a film of equal frames.

    pixels [patches, 3, size, size], with videos [patches, 3, frames, size, size] -> rows.
    """

    def __init__(self, config: TransformerConfig, architecture: VisionArchitecture) -> None:
        super().__init__(config)
        assert architecture.native is not None
        self.native, size = architecture.native, architecture.patch_size
        kernel = (self.native.frames, size, size)
        self.projection = PatchProjection(
            3, architecture.hidden_size, kernel, stride=kernel, bias=architecture.patch_bias, dtype=config.params_dtype
        )
        config.init_method(self.projection.weight.data)
        if self.projection.bias is not None:
            torch.nn.init.zeros_(self.projection.bias)
        self.norm: torch.nn.Module = torch.nn.Identity()
        if architecture.pre_norm:
            self.norm = build_norm(outside_layers(config), architecture.hidden_size, architecture.norm_epsilon)
        if side := self.native.learned_positions:
            weight = torch.empty(side**2, architecture.hidden_size, dtype=config.params_dtype)
            self.positions = torch.nn.Parameter(weight)
            config.init_method(self.positions.data)
        if cells := self.native.axis_positions:
            weight = torch.empty(2, cells, architecture.hidden_size, dtype=config.params_dtype)
            self.axis_positions = torch.nn.Parameter(weight)
            config.init_method(self.axis_positions.data)

    def forward(self, hidden: None, batch: Microbatch, view: View) -> Tensor:
        """Map pixels of the pack's patches to rows in the ViT's order, this rank's share."""
        images = Images.of(batch)
        assert images.values is not None
        pixels = images.values.to(self.projection.weight.dtype)
        if pixels.dim() == 4:
            pixels = pixels.unsqueeze(2).expand(-1, -1, self.native.frames, -1, -1)
        rows = self.norm(self.projection(pixels))
        rows = rows if view.patch_order is None else rows[view.patch_order]
        if side := self.native.learned_positions:
            layout = row_layout(images.grids, self.native.merge, self.native.window)  # the viewer has just asked for it
            bilinear = partial(stretched_positions, edges=self.native.edges_aligned)
            stretch = bicubic_positions if self.native.bicubic else bilinear
            at, sizes = (platform.to_device(torch.from_numpy(each)) for each in (layout.cells, layout.sizes))
            cells, weights = stretch(at, sizes, side)
            # In fp32, as transformers does; one kernel for all that are around a patch, told where each patch's begin.
            begins = torch.arange(0, cells.numel(), cells.shape[1], device=cells.device)
            sums = _weighted_sums(self.positions.float(), cells.flatten(), begins, weights.flatten())
            rows = rows + sums.to(rows.dtype)
        if self.native.axis_positions:
            rows = rows + self._of_axes(images.grids)
        return share_rows(rows.unsqueeze(1), self.config)

    def _of_axes(self, grids: tuple[Grid, ...]) -> Tensor:
        """Sum learned positions of each patch's column and row. Raises UserError if an image is larger than these."""
        cells, most = row_layout(grids, self.native.merge, self.native.window).cells, self.native.axis_positions
        assert most is not None
        if (largest := 1 + int(cells.max(initial=0))) > most:
            raise UserError(
                f"an image of {largest} patches a side, the ViT has {most} learned positions; give fewer --max-pixels "
                "in preprocessing"
            )
        row, column = platform.to_device(torch.from_numpy(cells)).unbind(1)
        return self.axis_positions[0][column] + self.axis_positions[1][row]
