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
    turns: Sequence[Sequence[int]] = (),
) -> NDArray[Any]:
    """Time, row and column of every token of a pack, counted inside its sample: int64 [3, T], or fp32 where a clock
    counts in fractions.

    A text token has one position on all three axes. Image tokens have the position of the image's start plus their
    step, row and column; text after them continues behind the longer of rows and columns, also after a longer video
    (as in transformers 5), or behind all three (`VideoClock`). `starts`: first token of each image in the pack.
    `seconds`: between the steps of each, for models with positions per second, whose multiples are rounded down (but of
    a clock that counts in fractions); else a step is a position. `turns`: of each image the alternating runs of a
    video's tokens and its own sound's, which both begin at one position; () for all others.
    """
    seconds, turns = seconds or [1.0] * len(grids), turns or [()] * len(grids)
    images, begin, found = list(zip(starts, grids, seconds, turns, strict=True)), 0, []
    for length in lengths:
        sample = _Sample(native, length)
        while images and images[0][0] < begin + length:
            start, grid, interval, by_turns = images.pop(0)
            sample.image(start - begin, grid, interval, by_turns)
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

    def image(self, start: int, grid: Grid, interval: float, turns: Sequence[int]) -> None:
        """The words before an image or video, and its tokens."""
        if self.clock is None:
            self.words(start)
            self._add(self._steps_rows_columns(grid, interval))
            self.next = self.next + self.kind(max(grid[1:]) // self.native.merge)
        elif turns:
            self.words(start - 2)
            self._two_marks()
            self._add(self._by_turns(self._steps_rows_columns(grid, interval), turns))
            self._go_on_behind(turns[-1])
            self._two_marks()
        else:
            self.words(start - 1)
            self.words(start)
            self._add(self._steps_rows_columns(grid, interval))
            self._go_on_behind(self.tokens - start)
            self.words(self.tokens + 1)

    def _go_on_behind(self, tokens: int) -> None:
        """Behind the last of so many tokens on any axis: of a heard video, those of its last turn."""
        self.next = self.pieces[-1][:, -tokens:].max() + self.kind(1)

    def _two_marks(self) -> None:
        """At either end of a video that is heard too."""
        assert self.clock is not None
        if self.clock.chunk_seconds is None:
            self.words(self.tokens + 2)
        else:
            self._add(np.zeros((3, 2), self.kind))
            self.next = self.next + self.kind(1)

    def _by_turns(self, seen: NDArray[Any], turns: Sequence[int]) -> NDArray[Any]:
        heard = np.broadcast_to(np.arange(sum(turns[1::2])).astype(self.kind), (3, sum(turns[1::2])))
        of_sound = np.arange(len(turns)).repeat(turns) % 2 == 1
        both = np.empty((3, sum(turns)), self.kind)
        both[:, ~of_sound], both[:, of_sound] = seen, heard
        return both

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
