"""Frame numbers that a model sees of a video: the methods of transformers' video processors.

| method | frames |
|---|---|
| `even` | from the first one on, `fps` a second, an even number (Qwen2-VL) |
| `spread` | from the first to the last one, `fps` a second (Qwen3-VL) |
| `by second` | one after each 1 / `fps` seconds; beyond `max_seconds`, as many as of it, spread evenly (GLM-4.1V) |
| `by length` | 6 a second up to half a minute, 2 up to five, 1 beyond; 640 at most (GLM-4.6V) |
"""

from math import ceil, floor

import numpy as np
import torch

from megatron.vlm.data.media.tiles import FRAMES

PACES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""For `by length`: (up to this many seconds, steps a second)."""
MOST_BY_LENGTH = 640


def even(total: int, rate: float, fps: float, least: int, most: int) -> list[int]:
    """With torch.arange, to round as transformers does; it may yield one frame too many, which is dropped."""
    most = floor(min(most, total) / FRAMES) * FRAMES
    wanted = min(max(total / rate * fps, least), most, total)
    count = floor(wanted / FRAMES) * FRAMES
    frames: list[int] = torch.arange(0, total, total / count).int().tolist()
    return [frame for frame in frames if frame < total]


def spread(total: int, rate: float, fps: float, least: int, most: int) -> list[int]:
    """`least` to `most` frames, evenly spaced from the first to the last."""
    count = min(max(int(total / rate * fps), least), most, total)
    frames: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return frames


def by_second(total: int, rate: float, seconds: float, fps: float, max_seconds: float) -> list[int]:
    """`fps` frames a second, without duplicates; spread evenly over videos longer than `max_seconds`."""
    if seconds <= max_seconds:
        found = [min(total - 1, ceil(step * rate / fps)) for step in range(max(floor(seconds * fps), 1))]
    elif (count := int(max_seconds * fps)) >= total:
        found = list(range(total))
    else:
        found = [min(total - 1, ceil(time * rate)) for time in np.linspace(0, seconds, count)]
    return sorted(set(found))


def by_length(total: int, rate: float, seconds: float) -> list[int]:
    """Frames at the pace of the length, without duplicates; spread evenly if that gives another number than wanted."""
    pace = next((steps for limit, steps in PACES if seconds <= limit), PACES[-1][1])
    count = min(int(min(seconds, PACES[-1][0]) * pace * FRAMES), MOST_BY_LENGTH)
    found = [] if total < count else _at_pace(total, rate, 1 / (FRAMES * pace), int(seconds))
    if total < count or len(found) > count:
        found = np.linspace(0, total - 1, count, dtype=int).tolist()
    elif len(found) < count:
        first, last = (found[0], found[-1]) if found else (0, max(total - 1, 0))
        found = np.linspace(first, last, count, dtype=int).tolist()
    return sorted(set(found))


def _at_pace(total: int, rate: float, step: float, last_second: int) -> list[int]:
    """The first frame at or after each step, up to the last full second."""
    found, second, a_frame = [], 0.0, 1 / rate
    for frame in range(total):
        if frame * a_frame >= second:
            second += step
            found.append(frame)
            if second >= last_second:
                break
    return found
