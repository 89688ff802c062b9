"""Rules for which frames of a video a model sees, and at which size, as transformers' video processors have them.

The rules stand in the folders of the families that have them; `families.media.VIDEO_RULES` finds them by markup.
`capped` limits long videos further, as Qwen's own code does.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from omnibal_ext.errors import Rejected
from omnibal_ext.families.towers.tiling import grown, square_grid
from omnibal_ext.modalities.vision.tiling import FRAMES, SQUARE, Grid, VideoFrames

MOST_FRAMES_SEEN = 2**14


@dataclass(frozen=True, slots=True)
class VideoRule(ABC):
    """Which frames of a video are seen, and at which size: fields of its processor, which datasets record."""

    whole: bool
    """Whether pixel limits are of all frames together, and each step has its own run of tokens (from Qwen3-VL on)."""
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    capped: bool = False
    max_tokens: int = 0
    """Most tokens, if `capped`: of a video, or of a frame if `whole`."""
    sampling: str = "even"
    """Name of the subclass's way, in datasets."""
    max_seconds: float = 300.0
    """Length that "by second" samples at `fps`."""
    refused: str = ""
    """Reason why the model's processor is not supported for videos; "": it is."""

    obeys: ClassVar[tuple[str, ...]] = ("fps", "min_frames", "max_frames")
    """Fields that decide how many frames are sampled."""
    pace: ClassVar[str] = "{0.fps:g} frames a second, {0.min_frames} to {0.max_frames}"
    """Words for how many frames are seen."""
    fills_pairs: ClassVar[bool] = False
    """Whether an odd last frame is repeated before frames are resized, and a step has its first frame's time."""
    has_own_sizes: ClassVar[bool] = False
    """Whether the limits of pixels are the processor's own, not those of a folder's files."""

    def __str__(self) -> str:
        """Return the rule in words, as preprocessing prints it."""
        pixels = f"{self.min_pixels} to {self.max_pixels} pixels a {'video' if self.whole else 'frame'}"
        return self.refused or f"{self.pace.format(self)}, {pixels}"

    def step_seconds(self, rate: float) -> float:
        """Return the seconds from one temporal step (`FRAMES` frames) to the next, at a mean `rate` of seen frames."""
        return FRAMES / rate

    @abstractmethod
    def sample(self, total: int, rate: float, seconds: float) -> list[int]:
        """Return the numbers of the frames that are seen, of `total` at `rate` a second; [] if they are too few."""


def choose_frames(
    rule: VideoRule, times: Sequence[float], rate: float, seconds: float = 0, files: Sequence[str] = ()
) -> VideoFrames:
    """Return which frames of a video are seen; `times`: seconds of all, `rate`: frames a second, `files`: a file each.

    `seconds`: the measured length, whose rounding may differ from that of frames / rate (0: not measured). Raises
    `Rejected` (too_few_frames).
    """
    total = len(times)
    if total < FRAMES:
        raise Rejected("too_few_frames", f"{total} frames; a video has {FRAMES} or more, show it as an image")
    seconds = seconds or total / rate
    if not (frames := rule.sample(total, rate, seconds)):
        raise Rejected("too_few_frames", f"{seconds:.2g} seconds are too short to be seen, show it as an image")
    seen = [times[frame] for frame in (*frames, frames[-1])]
    second = 0 if rule.fills_pairs else 1
    steps = tuple((seen[step] + seen[step + second]) / 2 for step in range(0, len(frames), FRAMES))
    a_step = rule.step_seconds(len(frames) / total * rate)
    return VideoFrames(
        tuple(frames), steps, a_step, rule.whole, tuple(files[frame] for frame in frames) if files else ()
    )


def frame_grid(rule: VideoRule, frames: int, size: tuple[int, int], patch: int) -> Grid:
    """Return (columns, rows) of patches of each of `frames` frames of `size` pixels. Raises `Rejected` (too_narrow)."""
    width, height = size
    side, counted, rounded = SQUARE * patch, 1, 1
    if rule.whole:
        frames += frames % FRAMES * rule.fills_pairs
        counted, rounded = frames, round(frames / FRAMES) * FRAMES
        width, height = grown(size, side)
    return square_grid(width, height, patch, rule.min_pixels, _most_pixels(rule, frames, side), counted, rounded)


def _most_pixels(rule: VideoRule, frames: int, side: int) -> int:
    """Return the limit of pixels of a frame or, if `rule.whole`, of all frames of a video."""
    if not rule.capped:
        return rule.max_pixels
    least = int(rule.min_pixels * 1.05)
    if rule.whole:
        return max(min(rule.max_tokens * side**2, rule.max_pixels // frames), least) * frames
    return max(min(rule.max_pixels, int(rule.max_tokens * side**2 * 0.9) * FRAMES // frames), least)
