"""What torchcodec, the reader of transformers, makes of films; a program, as FFmpeg's libraries are chosen at its start.

    python -m tests.unit.data.torchcodec_reading OUT FILM...

OUT.npz has for each film its frames, seconds, and the pixels of some frames: uint8 [frames, 3, height, width].
"""

import sys

import numpy as np

SEEN = 9


def chosen(frames: int) -> list[int]:
    """Numbers of frames that are compared."""
    return sorted(set(np.linspace(0, frames - 1, SEEN).round().astype(int).tolist()))


def main(out: str, *films: str) -> None:
    """Read them as `transformers.video_utils.read_video_torchcodec` does."""
    from torchcodec.decoders import VideoDecoder

    found = {}
    for film in films:
        try:
            decoder = VideoDecoder(film, seek_mode="exact", num_ffmpeg_threads=0)
            told = decoder.metadata
            pixels = decoder.get_frames_in_range(0, told.num_frames).data.numpy()[chosen(told.num_frames)]
        except RuntimeError as error:
            found[f"{film} fault"] = np.array(str(error)[-300:])
            continue
        found[f"{film} told"] = np.array([told.num_frames, told.duration_seconds, told.average_fps])
        found[f"{film} pixels"] = pixels
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
