"""From an image's size to a grid of tiles, and from the image to its tiles.

    1800 x 900 image: grid 2 x 1                              tiles, in the order the model sees them:
    +---------+---------+                                    +---+ +---+ +-----------+
    |    0    |    1    |   resized to (2 T) x (1 T) pixels   | 0 | | 1 | | thumbnail |
    +---------+---------+                                    +---+ +---+ +-----------+

Rules of several tiles: `internvl`, the dynamic tiling of InternVL 1.5 (arXiv 2404.16821, section 3.3), where the images
of a conversation share the most tiles, and `internvl_each`, where each may have them, as in transformers' processor;
`anyres`, the grids of LLaVA-1.6 for each image, which keeps its aspect ratio on a black ground; the thumbnail comes
first and the language model sees the tiles joined (anyres.py); `anyres_max_9`, LLaVA-OneVision's, with up to 6 x 6
tiles. Of one tile: `pad`, the whole image on a square of the ViT's mean colour, as LLaVA-1.5 was trained; `crop`, the
middle square, as its published processor does; `fixed`, the image stretched; `gemma`, the same by bilinear
interpolation, as Gemma 3 has it, which needs to know where its images begin.

`split` brings an image's longer side to that of a square of the most tiles; each tile, and the whole image behind them,
stands at a place of its own in the words (Idefics 3).

`native` keeps an image near its own size (Qwen2-VL, arXiv 2409.12191): a tile is a patch, and patches follow each other
square by square, as many of them as become one token of the language model. `native_edge` makes it no larger than a
square of the most tiles, and rounds up (Pixtral, arXiv 2410.07073); `native_grown` makes what is narrower than a square
larger first (GLM-4.1V); `gemma4` takes as many patches as the limit allows (Gemma 4), however small the image,
and `gemma4_unified` the same of patches that are a square of them.

Pixels are those of transformers' image processors (the ones on Pillow), to which the tests compare them.
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
    """All grids of `min_tiles` to `max_tiles` tiles, smaller areas first: the order in which ties are settled."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


@lru_cache(maxsize=2**16)  # images of a corpus share a few sizes
def internvl_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """The grid whose aspect ratio is nearest to the image's.

    Of equally near ones the later, larger grid wins if the image has more than half of that grid's pixels.
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
    """The grid, of LLaVA-1.6's or others, keeping most of the image's pixels, of those the one with least padding."""

    def merit(grid: Grid) -> tuple[int, int]:
        full_width, full_height = grid[0] * tile_size, grid[1] * tile_size
        scale = min(full_width / width, full_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - full_width * full_height

    allowed = [grid for grid in grids if min_tiles <= grid[0] * grid[1] <= max_tiles]
    return max(allowed, key=merit, default=(1, 1))


def native_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """Patches a side for an image near its own size: whole squares, from `min_tiles` to `max_tiles` patches."""
    return square_grid(width, height, tile_size, min_tiles * tile_size**2, max_tiles * tile_size**2)


def grown_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """The same where an image narrower than a square is first made as wide (GLM-4.1V)."""
    return native_grid(*grown((width, height), SQUARE * tile_size), tile_size, min_tiles, max_tiles)


def grown(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Width and height, scaled so that neither is shorter than `side`."""
    larger = max(side / length for length in size)
    return (int(size[0] * larger), int(size[1] * larger)) if larger > 1 else size


def square_grid(
    width: int, height: int, patch: int, least: int, most: int, frames: int = 1, whole_frames: int = 1
) -> Grid:
    """Patches a side, in whole squares, for pictures near their own size: `least` to `most` pixels of all `frames`.

    `whole_frames` are those that the limits are asked of, `frames` those by which a picture is scaled. Raises
    `Rejected` (too_narrow).
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
    """Patches a side, in whole squares, for an image scaled to nearly `max_tiles` patches; at least one square a side,
    then as many times longer the other way as the image is. Raises `Rejected` (too_narrow) where that leaves none."""
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
    """Patches a side, in whole squares, for an image whose sides fit into a square of `max_tiles` patches.

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
    """Tiles a side for an image whose longer side becomes that of a square of `max_tiles`, the other one's rounded up.

    However small the image (Idefics 3).
    """
    edge = isqrt(max_tiles) * tile_size
    inner_width, inner_height = _at_edge(width, height, edge)
    if inner_width >= inner_height:
        inner_height = int(edge / (inner_width / inner_height))
    else:
        inner_width = int(edge * (inner_width / inner_height))
    return ceil(inner_width / tile_size), ceil(inner_height / tile_size)


def _at_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """Width and height where the longer side is `edge` and the other one even, as Idefics 3's processor has it."""
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
    """One tile, unless a long strip would take all memory on its way there."""
    if pixels > MAX_CANVAS:
        raise Rejected("too_many_pixels", f"{what}, are {pixels}, limit {MAX_CANVAS}; cut it into parts")
    return (1, 1)


def _stretch(
    image: Image.Image, size: tuple[int, int], resampling: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    return image.resize(size, resampling)


def _stretch_twice(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """To nearly its own shape, then to whole tiles (Idefics 3)."""
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
    """How a tiling rule chooses a grid, from (width, height, tile_size, min_tiles, max_tiles), and lays it out."""

    choose: Callable[[int, int, int, int, int], Grid]
    resize: Callable[[Image.Image, tuple[int, int]], Image.Image]  # the image over width and height of the whole grid
    thumbnail_first: bool = False
    joins_tiles: bool = False  # the language model reads the tiles' features as one picture, without its padding
    cap: int = 0  # joined tiles are made smaller beyond so many tiles' features; one alone has a thumbnail too
    native: bool = False  # tiles are patches, in squares
    square: int = SQUARE  # patches a side of one, there
    scaled: bool = True  # pixels are brought to the ViT's mean and deviation by the processor, and not by the model
    per_image: bool = False  # limits are those of an image, not of a conversation
    needs_image_starts: bool = False  # the language model must know where the tokens of each image begin
    prefix_attention: bool = False  # and where the answer of a sample does, which is one question's
    resampling: Image.Resampling = Image.Resampling.BICUBIC
    by_rows: bool = False  # each row of an image's features stands at a place of its own in the words
    by_tiles: bool = False  # so does each tile, and the whole image, which is made of what was cut
    among_several: "Rule | None" = None  # how an image among several becomes one tile; None: as it would alone

    @property
    def read_as(self) -> tuple[bool, int, bool, int, bool, bool, bool, bool]:
        """What a model must know of the rule: those that are alike in it serve the same ones."""
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

    `max_tiles` is for one conversation, whose images share it equally as in InternVL's multi-image training, or each
    image's own (`Rule.per_image`).
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
        """Tiles that each of `images` of a conversation may have."""
        return self.max_tiles if RULES[self.rule].per_image else max(1, self.max_tiles // images)


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Which frames of a video the model sees, in order: FRAMES a step, the last one again where one is missing."""

    frames: tuple[int, ...]
    """Their numbers in the video."""
    times: tuple[float, ...]
    """Seconds of each step: in the middle between its frames, or of its first one (GLM-V)."""
    seconds: float
    """Between two steps."""
    apart: bool
    """Each step stands at a place of its own in the words, behind its time."""
    files: tuple[str, ...] = ()
    """The frames' own files below the image root; () where they are in one video file."""


@dataclass(frozen=True, slots=True)
class TiledImage:
    """One image of a sample: its path relative to the image root, its grid, and whether it has a thumbnail.

    Of an image inside the input file the path is its name there, and `place` says where it is. Its size in pixels is
    kept where the tokens depend on it, by rules that join tiles. A video has a `film`, and the grid of each step; its
    path is the video's or the first frame's. `crcs` are its file's, or of each of a film's files; () if not taken.
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
        """In time: 1 of an image."""
        return len(self.film.times) if self.film else 1

    @property
    def tiles(self) -> int:
        """ViT tiles that the image becomes; of a video, patches of all steps."""
        return self.steps * self.columns * self.rows + self.thumbnail

    def at_steps(self, chosen: Sequence[int]) -> "TiledImage":
        """A video with some of its steps in time alone, ascending; an image has its one."""
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
        """Steps, rows and columns at each of its places in the words: one place, or one for each step of a video."""
        apart = self.film is not None and self.film.apart
        return [(1 if apart else self.steps, self.rows, self.columns)] * (self.steps if apart else 1)


def places_of(image: TiledImage, rule: str) -> Places:
    """At which places in the words an image's features stand, or a video's, as many at each."""
    if RULES[rule].by_tiles:
        return Places(image.rows, image.columns, image.thumbnail)
    return Places(image.rows // SQUARE if RULES[rule].by_rows else len(image.grids))


def tile_image(
    path: str, size: tuple[int, int], images: int, tiling: Tiling, place: Place = (), crcs: tuple[int, ...] = ()
) -> TiledImage:
    """Decide the grid of an image of `size` (width, height) pixels, one of `images` in its conversation."""
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
    whole = laid if layout.by_tiles else image
    thumbnail = np.asarray(_stretch(whole, (tile_size, tile_size), layout.resampling))[None]
    return np.concatenate([thumbnail, tiles] if layout.thumbnail_first else [tiles, thumbnail])
