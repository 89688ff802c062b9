"""How images become tiles: the base of the rules, which stand in the folders of the families that have them.

    1800 x 900 image: grid 2 x 1                              tiles, in the order the model sees them:
    +---------+---------+                                    +---+ +---+ +-----------+
    |    0    |    1    |   resized to (2 T) x (1 T) pixels   | 0 | | 1 | | thumbnail |
    +---------+---------+                                    +---+ +---+ +-----------+

Pixels equal those of transformers' Pillow image processors, in the tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import VISION, Modality
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.modalities.vision.features import FeatureOrder
from omnibal_ext.modalities.vision.runs import TokenRuns
from omnibal_ext.reading.fields import Fields

if TYPE_CHECKING:
    from PIL import Image

    from omnibal_ext.architectures.architecture import Architecture

Grid = tuple[int, int]  # columns, rows
SQUARE = 2  # patches a side that become one token, at native resolution; Gemma 4 has its own
FRAMES = 2  # of a video that become one step in time
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers of them


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """The frames of a video that are seen, FRAMES a temporal step; if the last step lacks one, its last is repeated."""

    frames: tuple[int, ...]
    """Numbers in the video of the frames."""
    times: tuple[float, ...]
    """Seconds of each step: the mean of its frames' times, or the first one's (GLM-V)."""
    seconds: float
    """Seconds between two steps."""
    apart: bool
    """Each step has a run of tokens of its own, after its time."""
    files: tuple[str, ...] = ()
    """A file for each frame, below the image root; () for a video file."""


@dataclass(frozen=True, slots=True)
class TiledImage:
    """One image or video of a sample: path below the image root, grid (a video's: of each step), thumbnail or not.

    `width` and `height` are set if the rule joins tiles. `place`: set for an image inside the input file; `path` is its
    name there. `film`: a video's frames; `path` is the video's or the first frame's. `crcs`: `Mark` of the file, or of
    each frame file; () if not recorded.
    """

    modality: ClassVar[Modality] = VISION
    path: str
    columns: int
    rows: int
    thumbnail: bool
    width: int = 0
    height: int = 0
    place: Place = ()
    film: VideoFrames | None = None
    crcs: tuple[Mark, ...] = ()

    @property
    def steps(self) -> int:
        """How many temporal steps it has; 1 for an image."""
        return len(self.film.times) if self.film else 1

    @property
    def tiles(self) -> int:
        """How many ViT tiles it is, of all steps, with the thumbnail."""
        return self.steps * self.columns * self.rows + self.thumbnail

    @property
    def files(self) -> tuple[str, ...]:
        """`film.files`."""
        return self.film.files if self.film else ()

    @property
    def units(self) -> int:
        """`tiles`: its part of a pack's budget."""
        return self.tiles

    @property
    def is_video_file(self) -> bool:
        """Whether it is a video in one file, not a list of frames, nor an image."""
        return self.film is not None and not self.film.files

    def at_steps(self, chosen: Sequence[int]) -> "TiledImage":
        """Return the video with only these steps, ascending; an image unchanged."""
        if self.film is None:
            return self
        frames = [frame for step in chosen for frame in range(FRAMES * step, FRAMES * (step + 1))]
        frames = [frame for frame in frames if frame < len(self.film.frames)]
        files = tuple(self.film.files[frame] for frame in frames) if self.film.files else ()
        crcs = tuple(self.crcs[frame] for frame in frames) if self.film.files and self.crcs else self.crcs
        seen, times = (tuple(self.film.frames[frame] for frame in frames)), tuple(self.film.times[s] for s in chosen)
        return replace(self, film=replace(self.film, frames=seen, times=times, files=files), crcs=crcs)

    @property
    def grids(self) -> list[tuple[int, int, int]]:
        """(steps, rows, columns) of each run of its tokens: one, or one for each step of a video (`film.apart`)."""
        apart = self.film is not None and self.film.apart
        return [(1 if apart else self.steps, self.rows, self.columns)] * (self.steps if apart else 1)


@dataclass(frozen=True, slots=True)
class Processor:
    """The image processor of a model's folder: its file, the fields (none where there is no file), and the model."""

    where: Path
    fields: Fields
    model: "Architecture"

    def fault(self, text: str) -> UserError:
        """Return a UserError that says `text` of the processor's file."""
        return UserError(f"{self.where}: {text}")

    def limit(self, edge: str, field: str = "size") -> int | None:
        """Return the pixels that a field such as `size` has for an edge, "longest_edge"; None: it has none."""
        size = self.fields.get(field)
        return size.get(edge) if isinstance(size, Mapping) else None


class TilingRule(ABC):
    """How an image becomes tiles and tokens, and what a model's folder may say of it.

    This base class: tiles of a fixed size, row by row, behind them a thumbnail where there are several.
    """

    name: str
    """Name in manifests, flags and `PromptFormat.tiling`."""
    read_as = "tiles"
    """Rules that are equal in it can replace each other: a model reads alike what they make."""
    native = False
    """Whether a tile is a patch (native resolution), and there is no thumbnail."""
    square = 1
    """Tiles a side of the squares by which they are ordered."""
    per_image = False
    """Limits of tiles are an image's, not a conversation's."""
    grids: tuple[Grid, ...] = ()
    """Grids of a model that joins tiles to one picture and derives an image's grid from its size; (): it does not."""
    always_thumbnail = False
    needs_image_starts = False
    """The model must know where each image's tokens begin."""
    prefix_attention = False
    """Tokens before the answer attend in both directions."""
    resampling = BICUBIC
    normalizes = True
    """The processor scales pixels to mean and deviation; else the model does."""
    side_fields: tuple[str, ...] = ("crop_size", "size")
    """Fields of the processor that must be a tile's side."""
    usual: Mapping[str, Any] = {}
    """Flags of preprocessing where nobody says otherwise, but for `model_recipe.DEFAULTS`."""

    @property
    def joins_tiles(self) -> bool:
        """Whether the features of an image's tiles are joined to one picture, without its padding."""
        return bool(self.grids)

    @abstractmethod
    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of `least` to `most` tiles for an image of these pixels. Raises `Rejected`."""

    def layout(self, size: tuple[int, int], images: int, tile_size: int, least: int, most: int) -> tuple[Grid, bool]:
        """Return the grid of an image of `size` pixels, one of `images`, and whether it may have a thumbnail."""
        columns, rows = grid = self.grid(*size, tile_size, least, most)
        return grid, columns * rows > 1

    def resize(self, image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
        """Return an RGB image resized to `size`, the pixels (width, height) of its whole grid."""
        return image.resize(size, self.resampling)

    def cut(self, image: "Image.Image", plan: TiledImage, tile_size: int) -> NDArray[np.uint8]:
        """Return an RGB image as `plan`'s tiles: uint8 [plan.tiles, tile_size, tile_size, 3]."""
        side, columns, rows = self.square, plan.columns // self.square, plan.rows // self.square
        resized = np.asarray(self.resize(image, (plan.columns * tile_size, plan.rows * tile_size)))
        cells = resized.reshape(rows, side, tile_size, columns, side, tile_size, 3).transpose(0, 3, 1, 4, 2, 5, 6)
        tiles = cells.reshape(-1, tile_size, tile_size, 3)
        if not plan.thumbnail:
            return tiles
        thumbnail = np.asarray(image.resize((tile_size, tile_size), self.resampling))
        return np.concatenate([tiles, thumbnail[None]])

    def runs(self, image: TiledImage) -> TokenRuns:
        """Return in how many runs the tokens of an image or video lie, all of the same length."""
        return TokenRuns(len(image.grids))

    def order(self, image: TiledImage, tokens_per_tile: float) -> FeatureOrder:
        """Return which features of its tiles an image's tokens are. Raises UserError if it is not known."""
        return FeatureOrder(np.arange(int(image.tiles * tokens_per_tile)))

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return {flag of preprocessing: value} as a folder's processor says. Raises UserError for unsupported ones.

        This base class: limits of tiles, in transformers' InternVL processor.
        """
        flags = {"min_patches": "min-tiles", "max_patches": "max-tiles"}
        return {flag: value for field, flag in flags.items() if (value := processor.fields.get(field))}

    def own_flags(self, config: Fields) -> dict[str, Any]:
        """Return {flag of preprocessing: value} set by the folder's config.json; here none."""
        return {}


class OneTile(TilingRule):
    """Rule that makes one tile of an image, stretching it."""

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (1, 1), whatever the image."""
        return (1, 1)
