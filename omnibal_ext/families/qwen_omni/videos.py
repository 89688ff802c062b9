"""Frames that the thinkers see of a video. Sizes are those of transformers' processors, whatever a folder says."""

from dataclasses import dataclass
from typing import ClassVar

from omnibal_ext.families.qwen_vl.videos import Even
from omnibal_ext.modalities.vision.tiling import FRAMES


@dataclass(frozen=True, slots=True)
class Clocked(Even):
    """Qwen2-VL's frames, but with steps as long as `fps` says, even if `max_frames` leaves fewer frames a second."""

    has_own_sizes: ClassVar[bool] = True

    def step_seconds(self, rate: float) -> float:
        """Return the seconds that `FRAMES` frames take at `fps`, whatever the true `rate`."""
        return FRAMES / self.fps


VIDEO_RULES = {
    "qwen2.5-omni": Clocked(False, 128 * 28**2, 768 * 28**2, fps=2.0, max_tokens=128000),
    "qwen3-omni": Clocked(False, 128 * 32**2, 768 * 32**2, fps=1.0, max_tokens=128000),
}
