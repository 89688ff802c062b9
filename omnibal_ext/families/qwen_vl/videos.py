"""Frames that Qwen's models see of a video."""

from dataclasses import dataclass
from math import floor

import numpy as np

from omnibal_ext.families.towers.video_rules import VideoRule
from omnibal_ext.modalities.vision.tiling import FRAMES


@dataclass(frozen=True, slots=True)
class Even(VideoRule):
    """An even number of frames, spaced evenly from the first one on, near `fps` a second (Qwen2-VL)."""

    def sample(self, total: int, rate: float, seconds: float) -> list[int]:
        """Return the numbers of the frames by torch.arange, which rounds as transformers; none beyond the last."""
        import torch  # which only this rule of all needs

        most = floor(min(self.max_frames, total) / FRAMES) * FRAMES
        wanted = min(max(total / rate * self.fps, self.min_frames), most, total)
        count = floor(wanted / FRAMES) * FRAMES
        frames: list[int] = torch.arange(0, total, total / count).int().tolist()
        return [frame for frame in frames if frame < total]


@dataclass(frozen=True, slots=True)
class Spread(VideoRule):
    """Frames evenly spaced from the first to the last, `min_frames` to `max_frames`, `fps` a second (Qwen3-VL)."""

    sampling: str = "spread"

    def sample(self, total: int, rate: float, seconds: float) -> list[int]:
        """Return the numbers of the frames by numpy, to round as transformers does."""
        count = min(max(int(total / rate * self.fps), self.min_frames), self.max_frames, total)
        frames: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return frames


VIDEO_RULES = {
    "qwen-vl": Even(False, 128 * 28**2, 768 * 28**2, max_tokens=128000),
    "qwen3-vl": Spread(True, 128 * 32**2, 768 * 32**2, max_tokens=768),
}
