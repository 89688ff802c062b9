"""Positions of a pack in models that have their own: M-RoPE (Qwen-VL, GLM-V, PaddleOCR-VL), TMRoPE (Qwen-Omni).

ids          s v I I I I e t t s t t v V V e         two samples; I of an image of 2 x 2 tokens, V of a film
positions    0 1 2 2 2 2 4 5 6 0 1 2 3 4 4 6         time
             0 1 2 2 3 3 4 5 6 0 1 2 3 4 4 6         row
             0 1 2 3 2 3 4 5 6 0 1 2 3 4 5 6         column

They are transformers' own, `get_rope_index` of each sample by itself, for numpy arrays and tensors; no torch is needed.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MODELS
from omnibal_ext.joining.positions import Grid, text_and_image_positions
from omnibal_ext.modalities.vision.architecture import NativeResolution, VideoClock

WORD, IMAGE, VIDEO, SOUND = range(4)
"""Kinds of tokens, as in transformers' `mm_token_type_ids`."""
MERGED = "image_grid_thw"
"""Among what a model takes: it has such positions."""


def has_positions(config: Any) -> bool:
    """Say whether models of this type have positions of time, row and column (M-RoPE)."""
    return config.model_type in MODELS and MERGED in MODELS[config.model_type].takes


def pack_positions(
    config: Any, ids: Any, bounds: Any, image_grids: Any = None, video_grids: Any = None, seconds: Any = None
) -> Any:
    """Return time, row and column of every token, counted inside its sample: [3, T], int64, of Qwen3-Omni fp32.

    It is a numpy array, or a tensor if `ids` is one, on its device.

    Args:
        config: transformers' configuration of the model (`model.config`).
        ids: token ids [T], the samples one after the other.
        bounds: where they begin and end, [samples + 1] (`cu_seqlens`).
        image_grids, video_grids: steps, rows and columns in patches [n, 3], in the order of their tokens
            (`image_grid_thw`, `video_grid_thw`); films whose steps are apart may have a row each step.
        seconds: between the steps of each video [n] (`second_per_grid_ts`, `video_second_per_grid`). None: 1.

    Raises:
        UserError: another model, or grids that are not those of the tokens.
    """
    config = getattr(config, "thinker_config", config)
    if not has_positions(config):
        known = ", ".join(kind for kind, model in MODELS.items() if MERGED in model.takes)
        raise UserError(f"models of type {config.model_type!r}: not known to have positions of their own; {known} have")
    tokens, edges = _on_host(ids).reshape(-1), _on_host(bounds)
    if edges[0] or edges[-1] != len(tokens) or (np.diff(edges) < 1).any():
        raise UserError(f"bounds of samples must rise from 0 to {len(tokens)}, the number of tokens; got {edges}")
    media = _Media(image_grids, video_grids, seconds)
    native = _native_of(config)
    kinds = [_kinds(config, tokens[begin:end], media.filmed) for begin, end in pairwise(edges.tolist())]
    return _like(ids, _positions(kinds, media, native))


def positions_by_kind(kinds: Any, bounds: Any, image_grids: Any = None, video_grids: Any = None) -> Any:
    """Return positions as `pack_positions`, by transformers' `mm_token_type_ids` [T]: int64 [3, T].

    All models that have both of these place images alike. Raises UserError for sounds and films of several steps.
    """
    of_tokens, media = _on_host(kinds).reshape(-1), _Media(image_grids, video_grids, whole_films=False)
    patches, seen = sum(_tokens(grid, 1) for grid in (*media.images, *media.videos)), int((of_tokens != WORD).sum())
    merge = isqrt(patches // max(1, seen)) or 1
    if (of_tokens == SOUND).any() or (patches and patches != merge**2 * seen):
        raise UserError("a pack with sounds, or images whose grids are not those of their tokens")
    found = [of_tokens[begin:end] for begin, end in pairwise(_on_host(bounds).tolist())]
    return _like(kinds, _positions(found, media, NativeResolution(merge)))


def _on_host(values: Any) -> NDArray[Any]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _like(given: Any, positions: NDArray[Any]) -> Any:
    """Convert positions to a tensor on the device of `given`, if that is a tensor."""
    if not hasattr(given, "new_tensor"):
        return positions
    kind = given.float() if positions.dtype == np.float32 else given.long()
    return kind.new_tensor(positions)


def _native_of(config: Any) -> NativeResolution:
    """Return how the model counts positions: patches a token has, positions a second of video."""
    vision, clock = config.vision_config, None
    packs = MODELS[config.model_type].packs
    if (ticks := getattr(config, "position_id_per_seconds", None)) is not None:
        clock = VideoClock(ticks, config.seconds_per_chunk if packs is not None and packs.chunks else None)
    pace = getattr(vision, "tokens_per_second", None)
    return NativeResolution(vision.spatial_merge_size, positions_per_second=pace, clock=clock)


def _kinds(config: Any, ids: NDArray[Any], filmed: bool) -> NDArray[Any]:
    """Return the kind of each token of a sample: WORD, IMAGE, VIDEO or SOUND, int64 [tokens].

    Some models give images and videos one token: there, if `filmed`, it is a video's between a video's two marks.
    """
    kinds = np.zeros(len(ids), np.int64)
    for token, kind in (("audio_token_id", SOUND), ("video_token_id", VIDEO), ("image_token_id", IMAGE)):
        kinds[ids == getattr(config, token, None)] = kind
    packs = MODELS[config.model_type].packs
    if packs is not None and packs.videos_as_images and filmed:
        opened, closed = ((ids == getattr(config, f"video_{mark}_token_id")).cumsum() for mark in ("start", "end"))
        kinds[(kinds == IMAGE) & (opened > closed)] = VIDEO
    return kinds


class _Media:
    """Grids in the order of their tokens, each taken once."""

    def __init__(self, image_grids: Any, video_grids: Any, seconds: Any = None, whole_films: bool = True) -> None:
        """Take grids; `whole_films`: a run of tokens may be of several steps."""
        self.whole_films = whole_films
        self.images, self.videos = (deque(_rows(grids)) for grids in (image_grids, video_grids))
        self.filmed = bool(self.videos)
        told = [1.0] * len(self.videos) if seconds is None else [float(one) for one in _on_host(seconds).reshape(-1)]
        if len(told) != len(self.videos):
            raise UserError(f"seconds between steps of {len(told)} videos, but the grids of {len(self.videos)}")
        self.seconds = deque(told)

    def take(self, kind: int, most: int, merge: int) -> tuple[Grid, float]:
        """Take the next grid, with the seconds between its steps; of a video of more than `most` tokens one step.
        Raises UserError without one that fits."""
        grids = self.images if kind == IMAGE else self.videos
        if not grids:
            raise UserError(f"more {_called(kind)} than grids")
        grid = grids.popleft()
        interval = self.seconds.popleft() if kind == VIDEO else 1.0
        steps, rows, columns = grid
        if kind == VIDEO and _tokens(grid, merge) > most >= _tokens((1, rows, columns), merge):
            grid = (1, rows, columns)
            grids.extendleft([grid] * (steps - 1))
            self.seconds.extendleft([interval] * (steps - 1))
        if _tokens(grid, merge) > most:
            raise UserError(f"{_called(kind)}: {most} tokens of one whose grid {grid} has {_tokens(grid, merge)}")
        if grid[0] > 1 and not self.whole_films:
            raise UserError(f"videos: the {grid[0]} steps of one have no words between them")
        return grid, interval


def _called(kind: int) -> str:
    return "images" if kind == IMAGE else "videos"


def _rows(grids: Any) -> list[Grid]:
    return [] if grids is None else [tuple(row) for row in _on_host(grids).reshape(-1, 3).tolist()]


def _tokens(grid: Grid, merge: int) -> int:
    return grid[0] * grid[1] * grid[2] // merge**2


class _Run(NamedTuple):
    """Tokens of one kind, of a heard video also those of its sound."""

    start: int
    kind: int
    turns: list[int]
    """How many they are; of a heard video of it and its sound in turn."""


def _runs(kinds: NDArray[Any]) -> list[_Run]:
    """Return the runs of one kind of a sample's tokens, without words; a video and its sound in turn are one run."""
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    found: list[_Run] = []
    for begin, end in pairwise(edges):
        kind, last = int(kinds[begin]), found[-1] if found else None
        follows = last is not None and last.kind == VIDEO and last.start + sum(last.turns) == begin
        if last is not None and follows and kind in (VIDEO, SOUND):
            last.turns.append(end - begin)
        elif kind != WORD:
            found.append(_Run(begin, kind, [end - begin]))
    return found


class _Shown:
    """What `text_and_image_positions` is told of a pack's media."""

    def __init__(self, media: _Media, merge: int) -> None:
        self.media, self.merge = media, merge
        self.starts: list[int] = []
        self.grids: list[Grid] = []
        self.seconds: list[float] = []
        self.turns: list[tuple[int, ...]] = []
        self.sounds: list[tuple[int, int]] = []

    def add(self, start: int, run: _Run) -> None:
        """Add a run at token `start` of the pack, with the next grids. Raises UserError if they do not fit it."""
        if run.kind == SOUND:
            self.sounds.append((start, run.turns[0]))
            return
        left, heard = sum(run.turns[::2]), tuple(run.turns) if len(run.turns) > 1 else ()
        while left:
            grid, interval = self.media.take(run.kind, left, self.merge)
            count = _tokens(grid, self.merge)
            if heard and count < left:
                raise UserError(f"videos: {left} tokens of one that is heard, whose grid {grid} has {count}")
            self.starts.append(start)
            self.grids.append(grid)
            self.seconds.append(interval)
            self.turns.append(heard)
            start, left = start + count, left - count


def _positions(kinds: Sequence[NDArray[Any]], media: _Media, native: NativeResolution) -> NDArray[Any]:
    """Return the positions of samples, by the kinds of their tokens. Raises UserError for grids that are not theirs."""
    shown, begin = _Shown(media, native.merge), 0
    for number, sample in enumerate(kinds):
        try:
            for run in _runs(sample):
                shown.add(begin + run.start, run)
        except UserError as error:
            raise UserError(f"sample {number} of the pack: {error}") from None
        begin += len(sample)
    if left := len(media.images) + len(media.videos):
        raise UserError(f"a pack with grids of {left} images or videos without tokens")
    lengths = [len(sample) for sample in kinds]
    return text_and_image_positions(
        lengths, shown.grids, shown.starts, native, shown.seconds, shown.turns, shown.sounds
    )
