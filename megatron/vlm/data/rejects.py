"""Rejected samples: reasons, remedies, counts, and the error if there are too many."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.json_list import is_list
from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import Check, integer, record, text
from omnibal_ext.reading.document import read_lines
from omnibal_ext.reading.files import open_plain
from omnibal_ext.reading.stores import located_in_file, named_stores

LEAST_LIMIT, LINES_A_REJECT = 10, 100
_ROOT = "paths start from --image-root, by default the folder of each input: name the folder in which they are"
_COPY_AGAIN = "fetch or copy the files again"
_FORMAT = "write the lines as docs/data.md says"
_SMALLER = "scale or cut these files"
REMEDIES = {
    "malformed_line": _FORMAT,
    "not_utf8": "write the lines in UTF-8",
    "empty_conversation": "leave out conversations without words to learn",
    "bad_roles": "let turns alternate, and end with the assistant's",
    "several_turns": "write each question and its answer as a conversation of its own",
    "no_image": "leave out conversations without an image",
    "unsupported_media": "leave out what this model does not see",
    "unsupported_field": "leave out the field, or choose a --chat-template that has a form for it",
    "costly_template": "choose a --chat-template that takes less time and memory, or leave out these conversations",
    "image_mark_mismatch": "write one <image> for each image, in the human's words",
    "video_mark_mismatch": "write one <video> for each video, in the human's words",
    "reserved_words": "write these words otherwise",
    "too_many_characters": "cut the conversations",
    "no_tokens": "write these words otherwise, or give the model's own tokenizer",
    "path_outside_root": _ROOT,
    "missing_image": _ROOT,
    "unreadable_image": "make the files readable for this user, entirely",
    "remote_image": "fetch the images, and name the files",
    "empty_image": _COPY_AGAIN,
    "not_an_image": "save the images as PNG, JPEG or WebP",
    "truncated_image": _COPY_AGAIN,
    "too_many_pixels": _SMALLER,
    "too_narrow": _SMALLER,
    "animated_image": "save the frame that is meant",
    "unscaled_pixels": "save 8 or 16 bits a pixel",
    "missing_video": _ROOT,
    "unreadable_video": "make the files readable for this user, entirely",
    "remote_video": "fetch the videos, and name the files",
    "empty_video": _COPY_AGAIN,
    "not_a_video": "save the videos as MP4, MKV or WebM",
    "truncated_video": _COPY_AGAIN,
    "too_few_frames": "show single frames as images",
    "frames_differ": "scale the frames of a video to one size",
    "audio_mark_mismatch": "write one <audio> for each sound, in the human's words",
    "missing_audio": _ROOT,
    "unreadable_audio": "make the files readable for this user, entirely",
    "remote_audio": "fetch the sounds, and name the files",
    "empty_audio": _COPY_AGAIN,
    "not_audio": "save the sounds as WAV, FLAC, MP3, M4A or OGG",
    "no_audio": "leave out videos without sound where a sound is due",
    "truncated_audio": _COPY_AGAIN,
    "too_short_audio": "leave out sounds of less than a few hundredths of a second",
    "too_long_audio": "cut these files",
    "too_many_tokens": "raise --max-tokens, or have longer ones made to fit: --shorten fewer-tiles truncate",
}
"""Reason of a rejection -> what to change in the input."""
REJECT: Check[dict[str, Any]] = record({"file": text, "line": integer(1), "reason": text, "detail": text})
"""A line of `rejected.jsonl`."""


def reject_limit(lines: int, limit: int | None) -> int:
    """Return how many of `lines` may be rejected: `limit`, by default one in a hundred and at least ten."""
    return max(LEAST_LIMIT, lines // LINES_A_REJECT) if limit is None else limit


class RejectCount:
    """Numbers of rejected lines by reason."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self._first: dict[str, Any] | None = None

    @classmethod
    def of_file(cls, path: Path) -> "RejectCount":
        """Count the lines of a `rejected.jsonl`."""
        count = cls()
        count.add(list(read_lines(path, REJECT, "preprocess again")))
        return count

    def add(self, rejections: Sequence[dict[str, Any]]) -> None:
        """Count rejected lines, as `rejected.jsonl` has them."""
        self.by_reason.update(row["reason"] for row in rejections)
        if rejections and self._first is None:
            self._first = rejections[0]

    @property
    def total(self) -> int:
        """Number of rejected lines."""
        return self.by_reason.total()

    def check(self, limit: int, lines: int, where: Path | None = None, whole: bool = False) -> None:
        """Raise `UserError`, with the remedy of the most frequent reason, if over `limit` of `lines` were rejected.

        `where` is the file that lists them; without it `whole` says whether these are all lines, or the first ones.
        """
        if self.total <= limit:
            return
        said = f"{self.total} of {lines} lines rejected, limit {limit}: {self.describe()}"
        listed = f"; all are in {where}" if where else ""
        remedy = REMEDIES.get(self.by_reason.most_common(1)[0][0], "fix the input")
        allowed = f", or allow them with --max-rejects {self.total}" if where or whole else ""
        allowed += " (what was prepared is kept)" if where else ""
        raise UserError(f"{said}{listed}; {remedy}{allowed}")

    def describe(self) -> str:
        """Name the reasons, most frequent first, and the first rejected line."""
        if self._first is None:
            return "it has none"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
        first = self._first
        return f"{reasons}; {_where(first)}: {first['reason']}, {first['detail']}"


def _where(row: dict[str, Any]) -> str:
    """Name the file of a rejected row, and which it is: "line 4", or "element 4" of a JSON list."""
    name, is_element = row["file"], False
    if name.endswith(".json"):
        with suppress(OSError, UserError), open_plain(located_in_file(name, named_stores()), "") as file:
            is_element = is_list(file.read(4096))
    return f"{name} {'element' if is_element else 'line'} {row['line']}"
