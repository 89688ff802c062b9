"""Where tokens stand: M-RoPE's time, row and column of words, images and videos (arXiv 2409.12191)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.microbatch import Grid
from omnibal_ext.architectures.vision import NativeResolution


def text_and_image_positions(
    lengths: Sequence[int],
    grids: Sequence[Grid],
    starts: Sequence[int],
    native: NativeResolution,
    seconds: Sequence[float] = (),
) -> NDArray[Any]:
    """Time, row and column of every token of a pack, counted inside its sample: int64 [3, T], or fp32 where a clock
    counts in fractions.

    A text token has one position on all three axes. Image tokens have the position of the image's start plus their
    step, row and column; text after them continues behind the longer of rows and columns, also after a longer video
    (as in transformers 5), or behind all three (`VideoClock`). `starts`: first token of each image in the pack.
    `seconds`: between the steps of each, for models with positions per second, whose multiples are rounded down (but of
    a clock that counts in fractions); else a step is a position.
    """
    images, begin, found = list(zip(starts, grids, seconds or [1.0] * len(grids), strict=True)), 0, []
    for length in lengths:
        sample = _Sample(native, length)
        while images and images[0][0] < begin + length:
            start, grid, interval = images.pop(0)
            sample.image(start - begin, grid, interval)
        sample.words(length)
        found += sample.pieces
        begin += length
    return np.concatenate(found, axis=1) if found else np.zeros((3, 0), np.int64)


class _Sample:
    """Positions of a sample's first tokens, piece by piece as transformers adds them up: fractions are rounded."""

    def __init__(self, native: NativeResolution, length: int) -> None:
        clock = native.clock
        self.native, self.clock, self.length = native, clock, length
        self.kind: Any = np.float32 if clock is not None and clock.chunk_seconds is None else np.int64
        self.pieces: list[NDArray[Any]] = []
        self.tokens, self.next = 0, self.kind(0)

    def words(self, until: int) -> None:
        """Up to this token, one position each."""
        if (count := min(until, self.length) - self.tokens) > 0:
            self._add(np.broadcast_to(np.arange(count).astype(self.kind), (3, count)))
            self.next = self.next + self.kind(count)

    def image(self, start: int, grid: Grid, interval: float) -> None:
        """The words before an image or video, and its tokens."""
        if self.clock is not None:
            self.words(start - 1)
        self.words(start)
        self._add(self._steps_rows_columns(grid, interval))
        if self.clock is None:
            self.next = self.next + self.kind(max(grid[1:]) // self.native.merge)
        else:
            self.next = self.pieces[-1].max() + self.kind(1)
            self.words(self.tokens + 1)

    def _add(self, places: NDArray[Any]) -> None:
        self.pieces.append(self.next + places)
        self.tokens += places.shape[1]

    def _steps_rows_columns(self, grid: Grid, interval: float) -> NDArray[Any]:
        steps, rows, columns = grid
        merge, seconds, pace = self.native.merge, np.float32(interval), self.native.positions_per_second
        step, row, column = np.indices((steps, rows // merge, columns // merge)).reshape(3, -1).astype(np.float32)
        time = step
        if self.clock is not None:  # in the order, and the precision, in which transformers multiplies
            time = step * seconds * np.float32(self.clock.per_second)
        elif pace is not None:
            time = step * (np.float32(pace) * seconds)
        return np.stack([time, row, column]).astype(self.kind)
