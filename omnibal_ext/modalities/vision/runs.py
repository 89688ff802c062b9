"""Places of an image's tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Layout of the tokens of an image or video in the text: rows x columns runs, all of the same length."""

    rows: int = 1
    columns: int = 1
    whole: bool = False
    """One more run for the entire image, after those of its tiles."""

    @property
    def count(self) -> int:
        """Number of runs, with the one of the entire image."""
        return self.rows * self.columns + self.whole
