"""What both ways of seeing videos need of a line: where a video's files lie, and whether its frames can be decoded."""

from collections.abc import Sequence
from pathlib import Path

from megatron.vlm.data.media.videos import read_frames
from megatron.vlm.preprocessing.line_media import LineMedia
from megatron.vlm.preprocessing.record_media import VideoReference
from omnibal_ext.errors import Rejected
from omnibal_ext.modalities.place import Place


def located(line: LineMedia, reference: VideoReference) -> list[tuple[str, Path, Place]]:
    """Return (path below the root, file, place) of a video file, or of each of its frames' files; they may be missing.

    Raises `Rejected` for URLs, paths outside the root, and frames inside an input file.
    """
    found = [line.found(file, "video") for file in reference.files]
    if reference.times and any(place for *_, place in found):
        raise Rejected("unsupported_media", "frames inside a file; a video inside it, or frames next to it, are read")
    return found


def decode(file: Path, place: Place, numbers: Sequence[int]) -> None:
    """Decode frames of a video file, to check them. Raises `Rejected` (truncated_video)."""
    try:
        for _ in read_frames(file, place, numbers, strict=True):
            pass
    except Exception as error:  # a broken file makes FFmpeg raise nearly anything
        raise Rejected("truncated_video", f"{file}: {str(error)[:200]}") from error
