"""Positions of tokens: M-RoPE's time, row and column of words, images and videos (arXiv 2409.12191)."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.modalities.vision.architecture import NativeResolution

Grid = tuple[int, int, int]
"""(temporal, rows, columns) in patches, of an image or video at native resolution."""


def text_and_image_positions(
    lengths: Sequence[int],
    grids: Sequence[Grid],
    starts: Sequence[int],
    native: NativeResolution,
    seconds: Sequence[float] = (),
    turns: Sequence[Sequence[int]] = (),
    sounds: Sequence[tuple[int, int]] = (),
) -> NDArray[Any]:
    """Return time, row and column of every token of a pack, counted inside its sample: int64 [3, T], or fp32 where a
    clock counts in fractions.

    A text token has one position on all three axes. Image tokens have the position of the image's start plus their
    step, row and column; text after them continues behind the longer of rows and columns, also after a longer video (as
    in transformers 5), or behind all three (`VideoClock`).

    Args:
        lengths: tokens of each sample.
        grids, starts: each image's or video's grid, and its first token in the pack.
        seconds: between the steps of each, for models with positions per second, whose multiples are rounded down (but
            of a clock that counts in fractions); else a step is a position.
        turns: of each video that is heard the alternating runs of its tokens and its sound's, which both begin at one
            position; () for all others.
        sounds: first token and number of tokens of each that no video has; they are words, but transformers adds
            fractions up from one to the next.
    """
    seconds, turns = seconds or [1.0] * len(grids), turns or [()] * len(grids)
    shown = [(start, each) for start, *each in zip(starts, grids, seconds, turns, strict=True)]
    ahead: list[tuple[int, Any]] = sorted([*shown, *sounds], key=itemgetter(0))
    counts_fractions = native.clock is not None and native.clock.chunk_seconds is None
    positions, begin = np.zeros((3, sum(lengths)), np.float32 if counts_fractions else np.int64), 0
    for length in lengths:
        sample = _Sample(native, positions[:, begin : begin + length])
        while ahead and ahead[0][0] < begin + length:
            start, given = ahead.pop(0)
            if isinstance(given, list):
                sample.image(start - begin, *given)
            else:
                sample.sound(start - begin, given)
        sample.words(length)
        begin += length
    return positions


class _Sample:
    """Writes one sample's positions, in the order in which transformers adds them up, as fractions are rounded."""

    def __init__(self, native: NativeResolution, positions: NDArray[Any]) -> None:
        """Write into `positions`, those of all tokens [3, tokens], of which the first `tokens` are written."""
        self.native, self.clock, self.positions = native, native.clock, positions
        self.kind = positions.dtype.type
        self.tokens, self.next = 0, self.kind(0)

    def words(self, until: int) -> None:
        """Write the positions of words up to token `until` of the sample, one each."""
        if (count := min(until, self.positions.shape[1]) - self.tokens) > 0:
            self._add(np.arange(count, dtype=self.kind), count)
            self.next = self.next + self.kind(count)

    def image(self, start: int, grid: Grid, interval: float, turns: Sequence[int]) -> None:
        """Write the positions of the words before an image or video, and of its tokens."""
        if self.clock is None:
            self.words(start)
            self._show(grid, interval)
            self.next = self.next + self.kind(max(grid[1:]) // self.native.merge)
        elif turns:
            self.words(start - 2)
            self._two_marks()
            self._show(grid, interval, turns)
            self._go_on_behind(turns[-1])
            self._two_marks()
        else:
            self.words(start - 1)
            self.words(start)
            self._show(grid, interval)
            self._go_on_behind(self.tokens - start)
            self.words(self.tokens + 1)

    def sound(self, start: int, count: int) -> None:
        """Write the positions of the words before a sound, of its tokens, and of a mark on either side, each by
        itself."""
        for until in (start - 1, start, start + count, start + count + 1):
            self.words(until)

    def _go_on_behind(self, tokens: int) -> None:
        """Continue behind the last of so many tokens on any axis: of a heard video, those of its last turn."""
        self.next = self.positions[:, self.tokens - tokens : self.tokens].max() + self.kind(1)

    def _two_marks(self) -> None:
        """Write the positions of the two special tokens at either end of a video that is heard too."""
        assert self.clock is not None
        if self.clock.chunk_seconds is None:
            self.words(self.tokens + 2)
        else:
            self._add(np.zeros(2, self.kind), 2)
            self.next = self.next + self.kind(1)

    def _add(self, offsets: NDArray[Any], count: int) -> None:
        self.positions[:, self.tokens : self.tokens + count] = self.next + offsets
        self.tokens += count

    def _show(self, grid: Grid, interval: float, turns: Sequence[int] = ()) -> None:
        """Write the positions of an image's or video's tokens; of a heard video also those of its sound, in turn."""
        steps, rows, columns = grid[0], grid[1] // self.native.merge, grid[2] // self.native.merge
        seen = np.empty((3, steps, rows, columns), self.kind)
        seen[0] = self._times(steps, interval)[:, None, None]
        seen[1] = np.arange(rows)[:, None]
        seen[2] = np.arange(columns)
        if not turns:
            self._add(seen.reshape(3, -1), seen[0].size)
            return
        of_sound = np.arange(len(turns)).repeat(turns) % 2 == 1
        both = np.empty((3, len(of_sound)), self.kind)
        both[:, ~of_sound], both[:, of_sound] = seen.reshape(3, -1), np.arange(of_sound.sum())
        self._add(both, len(of_sound))

    def _times(self, steps: int, interval: float) -> NDArray[Any]:
        seconds, pace = np.float32(interval), self.native.positions_per_second
        if self.clock is not None:  # in the order, and the precision, in which transformers multiplies
            return (np.arange(steps, dtype=np.float32) * seconds * np.float32(self.clock.per_second)).astype(self.kind)
        if pace is not None:
            return (np.arange(steps, dtype=np.float32) * (np.float32(pace) * seconds)).astype(self.kind)
        return np.arange(steps)
