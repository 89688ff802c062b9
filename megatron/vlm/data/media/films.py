"""Which frames of a video a model sees, and how large: the rules of transformers' video processors.

| markup | frames | pixels |
|---|---|---|
| `qwen-vl` | evenly from the first one on, `fps` a second, an even number | `min_pixels` to `max_pixels` a frame |
| `qwen3-vl` | evenly from the first to the last one, `fps` a second | so many in all frames together |

Both take `min_frames` to `max_frames`, and no more than there are. `capped` bounds long videos further, as Qwen's own
programs do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import numpy as np
import torch

from megatron.vlm.data.media.tiles import FRAMES, SQUARE, Film, Grid, square_grid
from megatron.vlm.data.rejects import Rejected

MOST_FRAMES_SEEN = 2**14


@dataclass(frozen=True, slots=True)
class VideoRule:
    """The fields of a model's video processor. The defaults are transformers', and two frames a second."""

    whole: bool
    """Limits of pixels are of all frames together; each step stands apart in the words (Qwen3-VL)."""
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    capped: bool = False
    max_tokens: int = 0
    """Where capped: of a whole video, at `whole` of a frame."""
    refused: str = ""
    """Why videos cannot be shown as the model's processor does; "": they can."""

    def __str__(self) -> str:
        """As preprocessing prints it."""
        pixels = f"{self.min_pixels} to {self.max_pixels} pixels a {'video' if self.whole else 'frame'}"
        return self.refused or f"{self.fps:g} frames a second, {self.min_frames} to {self.max_frames}, {pixels}"


RULES_OF_MARKUP = {
    "qwen-vl": VideoRule(False, 128 * 28**2, 768 * 28**2, max_tokens=128000),
    "qwen3-vl": VideoRule(True, 128 * 32**2, 768 * 32**2, max_tokens=768),
}


def film_of(rule: VideoRule, times: Sequence[float], rate: float, files: Sequence[str] = ()) -> Film:
    """The frames that a model sees of a video with frames at these seconds, `rate` a second; `files` are their own.

    Raises `Rejected` (too_few_frames).
    """
    total = len(times)
    if total < FRAMES:
        raise Rejected("too_few_frames", f"{total} frames; a video has {FRAMES} or more, show it as an image")
    frames = _spread(rule, total, rate) if rule.whole else _even(rule, total, rate)
    seen = [times[frame] for frame in (*frames, frames[-1])]
    steps = tuple((seen[step] + seen[step + 1]) / 2 for step in range(0, len(frames), FRAMES))
    seconds = FRAMES / (len(frames) / total * rate)
    return Film(tuple(frames), steps, seconds, rule.whole, tuple(files[frame] for frame in frames) if files else ())


def _even(rule: VideoRule, total: int, rate: float) -> list[int]:
    """Qwen2-VL's: in torch, whose rounding of a float's steps decides now and then. It may count one too far."""
    most = floor(min(rule.max_frames, total) / FRAMES) * FRAMES
    wanted = min(max(total / rate * rule.fps, rule.min_frames), most, total)
    count = floor(wanted / FRAMES) * FRAMES
    frames: list[int] = torch.arange(0, total, total / count).int().tolist()
    return [frame for frame in frames if frame < total]


def _spread(rule: VideoRule, total: int, rate: float) -> list[int]:
    count = min(max(int(total / rate * rule.fps), rule.min_frames), rule.max_frames, total)
    frames: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return frames


def film_grid(rule: VideoRule, frames: int, size: tuple[int, int], patch: int) -> Grid:
    """Columns and rows of patches of each frame of (width, height) pixels. Raises `Rejected` (too_narrow)."""
    width, height = size
    side, counted, rounded = SQUARE * patch, 1, 1
    if rule.whole:
        counted, rounded = frames, round(frames / FRAMES) * FRAMES
        if min(size) < side:
            larger = max(side / height, side / width)
            width, height = int(width * larger), int(height * larger)
    return square_grid(width, height, patch, rule.min_pixels, _most_pixels(rule, frames, side), counted, rounded)


def _most_pixels(rule: VideoRule, frames: int, side: int) -> int:
    """Of a frame, or of the whole video where the limits are of it."""
    if not rule.capped:
        return rule.max_pixels
    least = int(rule.min_pixels * 1.05)
    if rule.whole:
        return max(min(rule.max_tokens * side**2, rule.max_pixels // frames), least) * frames
    return max(min(rule.max_pixels, int(rule.max_tokens * side**2 * 0.9) * FRAMES // frames), least)
