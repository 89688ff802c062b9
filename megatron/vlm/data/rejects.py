"""A verdict on a sample; counting what was rejected, and failing when it is too much."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import Check, record, text, whole
from omnibal_ext.reading.document import read_lines

FEW, ONE_IN = 10, 100
REJECT: Check[dict[str, Any]] = record({"file": text, "line": whole(1), "reason": text, "detail": text})
"""A line of `rejected.jsonl`."""


def reject_limit(lines: int, limit: int | None) -> int:
    """How many of `lines` may be rejected: `limit`, or where nobody says, one in a hundred and ten of few."""
    return max(FEW, lines // ONE_IN) if limit is None else limit


class Rejected(Exception):  # noqa: N818 - it is a verdict on a sample, not a fault of the program
    """A sample that cannot be used: a reason out of a small vocabulary, to count by, and a detail for the reader."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class RejectCount:
    """Rejected lines by reason, and the first of them."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self._first: dict[str, Any] | None = None

    @classmethod
    def of_file(cls, path: Path) -> "RejectCount":
        """Count a whole `rejected.jsonl`."""
        count = cls()
        count.add(list(read_lines(path, REJECT, "preprocess again")))
        return count

    def add(self, rejections: Sequence[dict[str, Any]]) -> None:
        """Count lines of `rejected.jsonl`."""
        self.by_reason.update(row["reason"] for row in rejections)
        if rejections and self._first is None:
            self._first = rejections[0]

    @property
    def total(self) -> int:
        """Rejected lines."""
        return self.by_reason.total()

    def check(self, limit: int, lines: int, where: Path) -> None:
        """Raise `UserError` if more than `limit` of the `lines` seen were rejected; `where` lists them."""
        if self.total > limit:
            raise UserError(
                f"{self.total} of {lines} lines rejected, limit {limit}: {self.describe()}; all are in {where}; "
                f"mend the input, or allow them with --max-rejects {self.total} (what was prepared is kept)"
            )

    def describe(self) -> str:
        """The reasons, most frequent first, and one rejected line."""
        if self._first is None:
            return "none rejected"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
        first = self._first
        return f"{reasons}; {first['file']} line {first['line']}: {first['reason']}, {first['detail']}"
