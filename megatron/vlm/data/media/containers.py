"""Opening videos and sounds: containers of a list, and no more of the machine than they may cost.

FFmpeg takes a file for what its first bytes say, and some of what it knows are lists of other files and addresses.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from megatron.vlm.data.media.images import MAX_PIXELS
from omnibal_ext.errors import Rejected

if TYPE_CHECKING:
    from av.container import InputContainer

SOUNDS = {
    "wav": "WAV", "aiff": "AIFF", "flac": "FLAC", "mp3": "MP3", "ogg": "OGG", "mov,mp4,m4a,3gp,3g2,mj2": "M4A, MP4",
    "matroska,webm": "MKV, WebM",
}  # fmt: skip
"""FFmpeg's names of the containers of sounds that are read -> what messages call them."""
FILMS = {
    "mov,mp4,m4a,3gp,3g2,mj2": "MP4, MOV", "matroska,webm": "MKV, WebM", "avi": "AVI", "mpegts": "MPEG-TS",
    "mpeg": "MPEG", "flv": "FLV", "ogg": "OGG", "asf": "WMV", "gif": "GIF",
}  # fmt: skip
"""FFmpeg's names of the containers of videos that are read -> what messages call them."""
MOST_STREAMS = 100
MOST_PACKETS = 2**20
"""Most packets of a file that is measured: nine hours at 30 frames a second, or six at the packets of AAC."""


@contextmanager
def open_container(
    file: BinaryIO, known: Mapping[str, str], reason: str, max_pixels: int = MAX_PIXELS
) -> "Iterator[InputContainer]":
    """Open a file from its start; frames of more than `max_pixels` are not decoded.

    Raises `Rejected` of this reason for a container that is not in `known` (`FILMS`, `SOUNDS`), else FFmpeg's errors.
    """
    import av

    limits = {
        "format_whitelist": ",".join(known),
        "protocol_whitelist": "",  # a file object needs none, and another file is never opened
        "max_streams": str(MOST_STREAMS),
    }
    file.seek(0)
    try:
        container = av.open(file, options={"max_pixels": str(max_pixels)}, container_options=limits)
    except av.ArgumentError as error:  # what the list refuses
        raise Rejected(reason, f"of a container that is not read; read are {', '.join(known.values())}") from error
    with container:
        for stream in container.streams.video:
            if stream.codec_context:  # none of a codec that is not known
                stream.codec_context.options = {"max_pixels": str(max_pixels)}
        yield container
