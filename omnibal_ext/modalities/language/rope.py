"""Rotary positions (RoPE) as plain data: how queries and keys turn with a token's position."""

from dataclasses import dataclass, field
from math import log

from omnibal_ext.modalities.fields import LATER


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling for longer contexts.

    "linear" divides all frequencies by `factor`; "llama3" and "yarn" (arXiv 2309.00071) only low ones, yarn with
    scaled attention; "dynamic" increases the base for samples longer than the original context, by their length;
    "proportional" rotates only the first pairs of a head, with divided frequencies.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    """Frequencies with at most this many periods in the original context are divided by the full factor."""
    high_frequency_factor: float = 4.0
    """Frequencies with at least this many are unchanged."""
    original_positions: int = 8192
    whole_dimensions: bool = True
    """yarn rounds its correction range to integers (`truncate`)."""
    turning: float = field(default=1.0, metadata=LATER)
    """Fraction of a head's pairs that are rotated ("proportional")."""
    amplitude: float | None = field(default=None, metadata=LATER)
    """Factor on rotated queries and keys; None: 0.1 ln(factor) + 1 with yarn, else 1."""
    query_beta: float = field(default=0.0, metadata=LATER)
    """Factor on rotated queries at position p: 1 + beta ln(1 + floor(p / original_positions)) (Llama 4)."""

    @property
    def attention_factor(self) -> float:
        """Factor on rotated queries and keys: `amplitude`, else as its kind has it."""
        if self.amplitude is not None:
            return self.amplitude
        return 0.1 * log(self.factor) + 1 if self.kind == "yarn" and self.factor > 1 else 1.0


@dataclass(frozen=True)
class Rope:
    """RoPE of one layer's attention."""

    theta: float = 1e6
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    sections: tuple[int, ...] = ()
    """Numbers of frequencies for time, row and column (M-RoPE); (): all for the position in the sequence."""
    interleaved: bool = False
    """The three sections are interleaved instead of consecutive (Qwen3-VL)."""
    rotated: int | None = None
    """Only the first so many numbers of a head are rotated; None: all."""
