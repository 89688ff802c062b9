"""From an image's size to a grid of tiles, and from the image to its tiles.

    1800 x 900 image: grid 2 x 1                              tiles, in the order the model sees them:
    +---------+---------+                                    +---+ +---+ +-----------+
    |    0    |    1    |   resized to (2 T) x (1 T) pixels   | 0 | | 1 | | thumbnail |
    +---------+---------+                                    +---+ +---+ +-----------+

Rules of several tiles:
  internvl        InternVL 1.5's dynamic tiling (arXiv 2404.16821, section 3.3); max_tiles are a conversation's
  internvl_each   the same, max_tiles are an image's, as in transformers' processor
  anyres          LLaVA-1.6: one of five grids, padded with black, thumbnail first, tiles joined (anyres.py)
  anyres_max_9    LLaVA-OneVision: the same with grids of up to 6 x 6 tiles
  split           Idefics 3: the longer side becomes that of a square of max_tiles; each tile, and the thumbnail after
                  them, has its own text before it
Rules of one tile:
  pad             LLaVA-1.5 as trained: padded to a square with the ViT's mean colour
  crop            LLaVA-1.5's published processor: the centre square
  fixed           stretched; `gemma` (Gemma 3): by bilinear interpolation
Rules of native resolution, where a tile is a patch, and patches are ordered by the squares that become one token:
  native          near the image's own size (Qwen2-VL, arXiv 2409.12191)
  native_edge     no larger than a square of max_tiles, rounded up (Pixtral, arXiv 2410.07073)
  native_grown    images narrower than a square are enlarged first (GLM-4.1V)
  gemma4          scaled to as many patches as max_tiles allows; `gemma4_unified`: a patch is an entire square

Pixels equal those of transformers' Pillow image processors, in the tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import ceil, floor, isqrt, sqrt

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megatron.vlm.data.formats.rows import Place
from megatron.vlm.data.rejects import Rejected
from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import Places

Grid = tuple[int, int]  # columns, rows

# LLaVA-1.6's resolutions over its tile size. Small images fit several equally well; the first one wins. The order is
# transformers', which reads the published list as (height, width).
ANYRES_GRIDS: tuple[Grid, ...] = ((2, 1), (1, 2), (2, 2), (1, 3), (3, 1))
ANYRES_MAX_GRIDS: tuple[Grid, ...] = tuple((columns, rows) for rows in range(1, 7) for columns in range(1, 7))
SQUARE = 2  # patches a side that become one token, at native resolution; Gemma 4 has its own
FRAMES = 2  # of a video that become one step in time
MOST_TIMES_LONGER = 200  # as transformers' processors say
MAX_CANVAS = 2**28  # pixels, 0.8 GB
LLAVA_GROUND = (122, 116, 104)  # the mean of CLIP's pixels, of 255
GREY_GROUND = (127, 127, 127)  # of SigLIP's


@cache
def internvl_grids(min_tiles: int, max_tiles: int) -> tuple[Grid, ...]:
    """All grids of `min_tiles` to `max_tiles` tiles by area, the order in which ties are broken."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


@lru_cache(maxsize=2**16)  # images of a corpus share a few sizes
def internvl_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """The grid whose aspect ratio is nearest to the image's.

    Of equally near ones a larger grid wins if the image has more than half of its pixels.
    """
    aspect, area = width / height, width * height
    best, best_distance = (1, 1), float("inf")
    for columns, rows in internvl_grids(min_tiles, max_tiles):
        distance = abs(aspect - columns / rows)
        wins_tie = distance == best_distance and area > 0.5 * tile_size**2 * columns * rows
        if distance < best_distance or wins_tie:
            best, best_distance = (columns, rows), distance
    return best


def anyres_grid(
    width: int,
    height: int,
    tile_size: int,
    min_tiles: int,
    max_tiles: int,
    grids: tuple[Grid, ...] = ANYRES_GRIDS,
) -> Grid:
    """The grid that keeps most of the image's pixels, among these the one with least padding."""

    def merit(grid: Grid) -> tuple[int, int]:
        full_width, full_height = grid[0] * tile_size, grid[1] * tile_size
        scale = min(full_width / width, full_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - full_width * full_height

    allowed = [grid for grid in grids if min_tiles <= grid[0] * grid[1] <= max_tiles]
    return max(allowed, key=merit, default=(1, 1))


def native_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """Patches a side for an image near its own size: entire squares, `min_tiles` to `max_tiles` patches."""
    return square_grid(width, height, tile_size, min_tiles * tile_size**2, max_tiles * tile_size**2)


def grown_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """`native_grid` of the image enlarged to at least a square's side (GLM-4.1V)."""
    return native_grid(*grown((width, height), SQUARE * tile_size), tile_size, min_tiles, max_tiles)


def grown(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Width and height, scaled so that neither is shorter than `side`."""
    larger = max(side / length for length in size)
    return (int(size[0] * larger), int(size[1] * larger)) if larger > 1 else size


def square_grid(
    width: int, height: int, patch: int, least: int, most: int, frames: int = 1, whole_frames: int = 1
) -> Grid:
    """Patches a side, in entire squares, for an image or frames near their own size, of `least` to `most` pixels.

    Whether limits hold is judged by `whole_frames` frames, the scale computed for `frames`. Raises `Rejected`
    (too_narrow).
    """
    if max(width, height) > MOST_TIMES_LONGER * min(width, height):
        raise Rejected("too_narrow", f"{width} x {height} pixels, one side over {MOST_TIMES_LONGER} times the other")
    side = SQUARE * patch
    columns, rows = round(width / side), round(height / side)
    pixels = whole_frames * columns * rows * side**2
    if pixels > most:
        shrink = sqrt(frames * height * width / most)
        columns, rows = (max(1, floor(length / shrink / side)) for length in (width, height))
    elif pixels < least:
        grow = sqrt(least / (frames * height * width))
        columns, rows = (ceil(length * grow / side) for length in (width, height))
    return columns * SQUARE, rows * SQUARE


def filling_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int, square: int = 3) -> Grid:
    """Patches a side, in entire squares, for an image scaled to nearly `max_tiles` patches; a side of none gets one
    square, the other follows the aspect ratio. Raises `Rejected` (too_narrow) if none are left."""
    side, factor = square * tile_size, sqrt(max_tiles * tile_size**2 / (height * width))
    rows, columns = floor(factor * height / side), floor(factor * width / side)
    longest = max_tiles // square**2
    if not rows:
        rows, columns = 1, min(width // height, longest)
    elif not columns:
        rows, columns = min(height // width, longest), 1
    if not rows * columns:
        raise Rejected("too_narrow", f"{width} x {height} pixels become no square of {side} pixels a side")
    return columns * square, rows * square


def edge_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """Patches a side, in entire squares, for an image shrunk to fit into a square of `max_tiles` patches.

    Raises `Rejected` (too_narrow).
    """
    side = SQUARE * tile_size
    edge = isqrt(max_tiles) // SQUARE * side
    ratio = max(height / edge, width / edge)
    if ratio > 1:
        if min(width, height) < ratio:
            raise Rejected("too_narrow", f"{width} x {height} pixels, less than one a side of {edge} at most")
        width, height = floor(width / ratio), floor(height / ratio)
    return ((width - 1) // side + 1) * SQUARE, ((height - 1) // side + 1) * SQUARE


def split_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """Tiles a side for an image scaled so that its longer side is that of a square of `max_tiles`; the other is rounded
    up (Idefics 3)."""
    edge = isqrt(max_tiles) * tile_size
    inner_width, inner_height = _at_edge(width, height, edge)
    if inner_width >= inner_height:
        inner_height = int(edge / (inner_width / inner_height))
    else:
        inner_width = int(edge * (inner_width / inner_height))
    return ceil(inner_width / tile_size), ceil(inner_height / tile_size)


def _at_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """(width, height) scaled to a longer side of `edge` and an even shorter one (Idefics 3)."""
    if width >= height:
        shorter = int(edge / (width / height))
        return edge, max(1, shorter + shorter % 2)
    shorter = int(edge * (width / height))
    return max(1, shorter + shorter % 2), edge


def _one_tile(*_: int) -> Grid:
    return (1, 1)


def _one_padded(width: int, height: int, *_: int) -> Grid:
    return _within(max(width, height) ** 2, f"{width} x {height} pixels, padded to a square")


def _one_cropped(width: int, height: int, tile_size: int, *_: int) -> Grid:
    return _within(
        tile_size**2 * max(width, height) // min(width, height), f"{width} x {height} pixels, scaled to be cut"
    )


def _within(pixels: int, what: str) -> Grid:
    """One tile. Raises `Rejected` (too_many_pixels) if the intermediate image would be too large."""
    if pixels > MAX_CANVAS:
        raise Rejected("too_many_pixels", f"{what}, are {pixels}, limit {MAX_CANVAS}; cut it into parts")
    return (1, 1)


def _stretch(
    image: Image.Image, size: tuple[int, int], resampling: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    return image.resize(size, resampling)


def _stretch_twice(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """To nearly its aspect ratio, then to entire tiles (Idefics 3)."""
    shaped = _stretch(image, _at_edge(*image.size, max(size)), Image.Resampling.LANCZOS)
    return _stretch(shaped, size, Image.Resampling.LANCZOS)


def _letterbox(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    (width, height), (full_width, full_height) = image.size, size
    if full_width / width < full_height / height:
        inner = (full_width, min(ceil(height * full_width / width), full_height))
    else:
        inner = (min(ceil(width * full_height / height), full_width), full_height)
    ground = Image.new("RGB", size)
    ground.paste(_stretch(image, inner), ((full_width - inner[0]) // 2, (full_height - inner[1]) // 2))
    return ground


def _pad(image: Image.Image, size: tuple[int, int], colour: tuple[int, int, int] = LLAVA_GROUND) -> Image.Image:
    side = max(image.size)
    ground = Image.new("RGB", (side, side), colour)
    ground.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return _stretch(ground, size)


def _crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    (width, height), short = size, min(image.size)
    scaled = _stretch(image, (int(width * image.width / short), int(height * image.height / short)))
    left, top = (scaled.width - width) // 2, (scaled.height - height) // 2
    return scaled.crop((left, top, left + width, top + height))


@dataclass(frozen=True, slots=True)
class Rule:
    """How a tiling rule chooses a grid from (width, height, tile_size, min_tiles, max_tiles), and what else differs."""

    choose: Callable[[int, int, int, int, int], Grid]
    resize: Callable[[Image.Image, tuple[int, int]], Image.Image]  # to (width, height) of the grid
    thumbnail_first: bool = False
    joins_tiles: bool = False  # tiles' features are read as one picture, without padding (anyres.py)
    cap: int = 0  # joined tiles are downsampled to so many tiles' features; one tile has a thumbnail too
    native: bool = False  # a tile is a patch
    square: int = SQUARE  # patches a side that become one token, if native
    scaled: bool = True  # the processor, not the model, normalises pixels
    per_image: bool = False  # tile limits are per image, not per conversation
    needs_image_starts: bool = False  # the model must know where each image's tokens begin
    prefix_attention: bool = False  # tokens before the answer attend in both directions
    resampling: Image.Resampling = Image.Resampling.BICUBIC
    by_rows: bool = False  # each row of features is a run of tokens of its own
    by_tiles: bool = False  # each tile is, and the thumbnail, which is made from the resized image
    among_several: "Rule | None" = None  # the rule for an image among several; None: the same

    @property
    def read_as(self) -> tuple[bool, int, bool, int, bool, bool, bool, bool]:
        """What a model depends on: rules that are equal in it can replace each other."""
        language = (self.needs_image_starts, self.prefix_attention, self.by_rows, self.by_tiles)
        return self.joins_tiles, self.cap, self.native, self.square, *language


_BILINEAR = Image.Resampling.BILINEAR
_native = partial(Rule, resize=_stretch, native=True, per_image=True)
RULES = {
    "internvl": Rule(internvl_grid, _stretch),
    "internvl_each": Rule(internvl_grid, _stretch, per_image=True),
    "anyres": Rule(anyres_grid, _letterbox, thumbnail_first=True, joins_tiles=True, per_image=True),
    "anyres_max_9": Rule(
        partial(anyres_grid, grids=ANYRES_MAX_GRIDS),
        _letterbox,
        thumbnail_first=True,
        joins_tiles=True,
        cap=9,
        among_several=Rule(_one_padded, partial(_pad, colour=GREY_GROUND)),
    ),
    "pad": Rule(_one_padded, _pad),
    "crop": Rule(_one_cropped, _crop),
    "fixed": Rule(_one_tile, _stretch),
    "gemma": Rule(_one_tile, partial(_stretch, resampling=_BILINEAR), needs_image_starts=True, resampling=_BILINEAR),
    "paligemma": Rule(_one_tile, _stretch, prefix_attention=True),
    "native": _native(native_grid, needs_image_starts=True),
    "gemma4": _native(filling_grid, square=3, scaled=False, needs_image_starts=True),
    "gemma4_unified": _native(partial(filling_grid, square=1), square=1, scaled=False, needs_image_starts=True),
    "native_grown": _native(grown_grid, needs_image_starts=True),
    "native_edge": _native(edge_grid, by_rows=True),
    "split": Rule(split_grid, _stretch_twice, per_image=True, by_tiles=True, resampling=Image.Resampling.LANCZOS),
}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How images are cut: `tile_size` in pixels, tile counts without the thumbnail.

    `max_tiles` is per image (`Rule.per_image`), or per conversation and divided equally among its images, as in
    InternVL's multi-image training.
    """

    tile_size: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    rule: str = "internvl"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UserError(f"unknown tiling rule {self.rule!r}; known: {', '.join(RULES)}")
        if (RULES[self.rule].joins_tiles or RULES[self.rule].by_tiles) and not self.thumbnail:
            raise UserError(f"tiling rule {self.rule!r} has a thumbnail always; leave --no-thumbnail out")
        patches = RULES[self.rule].square ** 2
        if RULES[self.rule].native and (self.thumbnail or self.max_tiles < patches):
            raise UserError(f"tiling rule {self.rule!r} has no thumbnail and squares of {patches} patches at least")
        if not 1 <= self.min_tiles <= self.max_tiles or self.tile_size < 1:
            raise UserError(
                f"tile size {self.tile_size}, {self.min_tiles} to {self.max_tiles} tiles: all must be 1 or more, "
                "and the most no fewer than the least"
            )

    def share(self, images: int) -> int:
        """Most tiles of each of a conversation's `images` images."""
        return self.max_tiles if RULES[self.rule].per_image else max(1, self.max_tiles // images)


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """The sampled frames of a video, FRAMES a step; a missing one repeats the last."""

    frames: tuple[int, ...]
    """Their numbers in the video."""
    times: tuple[float, ...]
    """Seconds of each step: the mean of its frames' times, or the first one's (GLM-V)."""
    seconds: float
    """Between two steps."""
    apart: bool
    """Each step has a run of tokens of its own, after its time."""
    files: tuple[str, ...] = ()
    """A file for each frame, below the image root; () for a video file."""


@dataclass(frozen=True, slots=True)
class TiledImage:
    """One image or video of a sample: path below the image root, grid (a video's: of each step), thumbnail or not.

    `width` and `height` are set if the rule joins tiles. `place`: set for an image inside the input file; `path` is its
    name there. `film`: a video's frames; `path` is the video's or the first frame's. `crcs`: CRC-32 of the file, or of
    each frame file; () if not recorded.
    """

    path: str
    columns: int
    rows: int
    thumbnail: bool
    width: int = 0
    height: int = 0
    place: Place = ()
    film: VideoFrames | None = None
    crcs: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """Temporal steps; 1 for an image."""
        return len(self.film.times) if self.film else 1

    @property
    def tiles(self) -> int:
        """ViT tiles, of all steps."""
        return self.steps * self.columns * self.rows + self.thumbnail

    def at_steps(self, chosen: Sequence[int]) -> "TiledImage":
        """The video with only these steps, ascending; an image unchanged."""
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


def places_of(image: TiledImage, rule: str) -> Places:
    """The runs of tokens of an image or video, all of the same length."""
    if RULES[rule].by_tiles:
        return Places(image.rows, image.columns, image.thumbnail)
    return Places(image.rows // SQUARE if RULES[rule].by_rows else len(image.grids))


def tile_image(
    path: str, size: tuple[int, int], images: int, tiling: Tiling, place: Place = (), crcs: tuple[int, ...] = ()
) -> TiledImage:
    """Choose the grid of an image of `size` (width, height) pixels, one of `images` in its conversation."""
    rule = RULES[tiling.rule]
    kept = size if rule.joins_tiles else (0, 0)
    several = rule.among_several if images > 1 else None
    share = tiling.share(images)
    columns, rows = (several or rule).choose(*size, tiling.tile_size, min(tiling.min_tiles, share), share)
    thumbnail = tiling.thumbnail and several is None and (columns * rows > 1 or rule.cap > 0)
    return TiledImage(path, columns, rows, thumbnail, *kept, place, crcs=crcs)


def cut_tiles(image: Image.Image, plan: TiledImage, tile_size: int, rule: str) -> NDArray[np.uint8]:
    """Resize and cut an RGB image, row by row: uint8 [plan.tiles, tile_size, tile_size, 3]."""
    size = (plan.columns * tile_size, plan.rows * tile_size)
    layout = RULES[rule]
    shown = layout.among_several if layout.among_several and not plan.thumbnail else layout
    laid = shown.resize(image, size)
    resized = np.asarray(laid)
    cells = resized.reshape(plan.rows, tile_size, plan.columns, tile_size, 3).swapaxes(1, 2)
    if layout.native:
        side = layout.square
        squares = (plan.rows // side, side, plan.columns // side, side)
        cells = cells.reshape(*squares, tile_size, tile_size, 3).swapaxes(1, 2)
    tiles = cells.reshape(-1, tile_size, tile_size, 3)
    if not plan.thumbnail:
        return tiles
    source = laid if layout.by_tiles else image
    thumbnail = np.asarray(_stretch(source, (tile_size, tile_size), layout.resampling))[None]
    return np.concatenate([thumbnail, tiles] if layout.thumbnail_first else [tiles, thumbnail])
