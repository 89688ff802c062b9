"""Frames that GLM-V's models see of a video."""

from dataclasses import dataclass
from math import ceil, floor
from typing import ClassVar

import numpy as np

from omnibal_ext.families.towers.video_rules import VideoRule
from omnibal_ext.modalities.vision.tiling import FRAMES

PACES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Pairs (seconds, steps a second) of GLM-4.6V: a video of up to so many seconds is seen at that pace."""
MOST_BY_LENGTH = 640


@dataclass(frozen=True, slots=True)
class BySecond(VideoRule):
    """Frames 1 / `fps` seconds apart; beyond `max_seconds` as many as in these, spread evenly (GLM-4.1V)."""

    sampling: str = "by second"
    obeys: ClassVar[tuple[str, ...]] = ("fps", "max_seconds")
    pace: ClassVar[str] = "{0.fps:g} frames a second"
    fills_pairs: ClassVar[bool] = True

    def sample(self, total: int, rate: float, seconds: float) -> list[int]:
        """Return the numbers of the frames that are seen, ascending, none twice."""
        if seconds <= self.max_seconds:
            steps = range(max(floor(seconds * self.fps), 1))
            found = [min(total - 1, ceil(step * rate / self.fps)) for step in steps]
        elif (count := int(self.max_seconds * self.fps)) >= total:
            found = list(range(total))
        else:
            found = [min(total - 1, ceil(time * rate)) for time in np.linspace(0, seconds, count)]
        return sorted(set(found))


@dataclass(frozen=True, slots=True)
class ByLength(BySecond):
    """Frames by length: 6 a second up to half a minute, 2 up to five minutes, 1 beyond; 640 at most (GLM-4.6V)."""

    sampling: str = "by length"
    obeys: ClassVar[tuple[str, ...]] = ()
    pace: ClassVar[str] = "6 frames a second, fewer of long videos"

    def sample(self, total: int, rate: float, seconds: float) -> list[int]:
        """Return the frames seen at the pace of the video's length, none twice; spread evenly if these are too few or
        too many."""
        pace = next((steps for limit, steps in PACES if seconds <= limit), PACES[-1][1])
        count = min(int(min(seconds, PACES[-1][0]) * pace * FRAMES), MOST_BY_LENGTH)
        found = [] if total < count else _at_pace(total, rate, 1 / (FRAMES * pace), int(seconds))
        if total < count or len(found) > count:
            found = np.linspace(0, total - 1, count, dtype=int).tolist()
        elif len(found) < count:
            first, last = (found[0], found[-1]) if found else (0, max(total - 1, 0))
            found = np.linspace(first, last, count, dtype=int).tolist()
        return sorted(set(found))


VIDEO_RULES = {
    "glm-4.1v": BySecond(True, 112**2, 60000 * 28**2, max_tokens=1),
    "glm-4.6v": ByLength(True, 112**2, 60000 * 28**2, max_tokens=1),
}


def _at_pace(total: int, rate: float, step: float, last_second: int) -> list[int]:
    """Return the first frame at or after each multiple of `step` seconds, up to `last_second`."""
    found, second, a_frame = [], 0.0, 1 / rate
    for frame in range(total):
        if frame * a_frame >= second:
            second += step
            found.append(frame)
            if second >= last_second:
                break
    return found
