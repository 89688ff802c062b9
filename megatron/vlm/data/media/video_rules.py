"""Which frames of a video a model sees, and at which size: the rules of transformers' video processors.

| markup | frames (`sampling`) | pixels |
|---|---|---|
| `qwen-vl` | even, `min_frames` to `max_frames` | `min_pixels` to `max_pixels` per frame |
| `qwen3-vl` | spread, `min_frames` to `max_frames` | `min_pixels` to `max_pixels` per video |
| `glm-4.1v` | by second | per video |
| `glm-4.6v` | by length | per video |

`capped` limits long videos further, as Qwen's own code does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.vlm.data.media.sampling import by_length, by_second, even, spread
from megatron.vlm.data.media.tiles import FRAMES, SQUARE, Grid, VideoFrames, grown, square_grid
from megatron.vlm.data.rejects import Rejected

MOST_FRAMES_SEEN = 2**14


@dataclass(frozen=True, slots=True)
class VideoRule:
    """The fields of a model's video processor, with transformers' defaults."""

    whole: bool
    """Pixel limits are of all frames together, and each step has its own run of tokens (from Qwen3-VL on)."""
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    capped: bool = False
    max_tokens: int = 0
    """If `capped`: of a video, or of a frame if `whole`."""
    sampling: str = "even"
    """A name of the table in `media/sampling.py`."""
    max_seconds: float = 300.0
    """For "by second"."""
    refused: str = ""
    """Why the model's processor is not supported for videos; "": it is."""

    def __str__(self) -> str:
        """As preprocessing prints it."""
        pixels = f"{self.min_pixels} to {self.max_pixels} pixels a {'video' if self.whole else 'frame'}"
        if self.refused:
            return self.refused
        many = {"by second": f"{self.fps:g} frames a second", "by length": "6 frames a second, fewer of long videos"}
        usual = f"{self.fps:g} frames a second, {self.min_frames} to {self.max_frames}"
        return f"{many.get(self.sampling, usual)}, {pixels}"

    @property
    def obeys(self) -> tuple[str, ...]:
        """The fields that decide how many frames are sampled."""
        return {"by second": ("fps", "max_seconds"), "by length": ()}.get(
            self.sampling, ("fps", "min_frames", "max_frames")
        )


VIDEO_RULES = {
    "qwen-vl": VideoRule(False, 128 * 28**2, 768 * 28**2, max_tokens=128000),
    "qwen3-vl": VideoRule(True, 128 * 32**2, 768 * 32**2, max_tokens=768, sampling="spread"),
    "glm-4.1v": VideoRule(True, 112**2, 60000 * 28**2, max_tokens=1, sampling="by second"),
    "glm-4.6v": VideoRule(True, 112**2, 60000 * 28**2, max_tokens=1, sampling="by length"),
}


def choose_frames(
    rule: VideoRule, times: Sequence[float], rate: float, seconds: float = 0, files: Sequence[str] = ()
) -> VideoFrames:
    """Sample the frames of a video; `times`: seconds of all frames, `rate`: frames a second, `files`: a file each.

    `seconds`: the measured length, whose rounding may differ from that of frames / rate (0: not measured). Raises
    `Rejected` (too_few_frames).
    """
    total = len(times)
    if total < FRAMES:
        raise Rejected("too_few_frames", f"{total} frames; a video has {FRAMES} or more, show it as an image")
    seconds = seconds or total / rate
    if not (frames := _chosen(rule, total, rate, seconds)):
        raise Rejected("too_few_frames", f"{seconds:.2g} seconds are too short to be seen, show it as an image")
    seen = [times[frame] for frame in (*frames, frames[-1])]
    middle = rule.sampling == "spread" or not rule.whole
    steps = tuple((seen[step] + seen[step + middle]) / 2 for step in range(0, len(frames), FRAMES))
    a_step = FRAMES / (len(frames) / total * rate)
    return VideoFrames(
        tuple(frames), steps, a_step, rule.whole, tuple(files[frame] for frame in frames) if files else ()
    )


def _chosen(rule: VideoRule, total: int, rate: float, seconds: float) -> list[int]:
    match rule.sampling:
        case "by second":
            return by_second(total, rate, seconds, rule.fps, rule.max_seconds)
        case "by length":
            return by_length(total, rate, seconds)
        case "spread":
            return spread(total, rate, rule.fps, rule.min_frames, rule.max_frames)
        case _:
            return even(total, rate, rule.fps, rule.min_frames, rule.max_frames)


def frame_grid(rule: VideoRule, frames: int, size: tuple[int, int], patch: int) -> Grid:
    """Columns and rows of patches of each frame of (width, height) pixels. Raises `Rejected` (too_narrow)."""
    width, height = size
    side, counted, rounded = SQUARE * patch, 1, 1
    if rule.whole:
        frames += frames % FRAMES * (rule.sampling != "spread")  # GLM-V's add the last one again before they resize
        counted, rounded = frames, round(frames / FRAMES) * FRAMES
        width, height = grown(size, side)
    return square_grid(width, height, patch, rule.min_pixels, _most_pixels(rule, frames, side), counted, rounded)


def _most_pixels(rule: VideoRule, frames: int, side: int) -> int:
    """The limit of pixels, per frame or, if `rule.whole`, per video."""
    if not rule.capped:
        return rule.max_pixels
    least = int(rule.min_pixels * 1.05)
    if rule.whole:
        return max(min(rule.max_tokens * side**2, rule.max_pixels // frames), least) * frames
    return max(min(rule.max_pixels, int(rule.max_tokens * side**2 * 0.9) * FRAMES // frames), least)
