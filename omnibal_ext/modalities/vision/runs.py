"""Places of an image's tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The runs of tokens of an image or video, all of the same length."""

    rows: int = 1
    columns: int = 1
    whole: bool = False
    """One more run for the entire image, after those of its tiles."""

    @property
    def count(self) -> int:
        """Number of runs."""
        return self.rows * self.columns + self.whole
