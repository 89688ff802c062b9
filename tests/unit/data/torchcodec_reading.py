"""What torchcodec, the reader of transformers, makes of films; a program, as FFmpeg's libraries are found at its start.

    python -m tests.unit.data.torchcodec_reading OUT FILM...

OUT.npz has for each film its frames, seconds and frames a second, and the pixels of some frames, by `chosen`.
"""

import sys

import numpy as np


def chosen(frames: int) -> list[int]:
    """Numbers of frames that are compared."""
    return sorted(set(np.linspace(0, frames - 1, 9).round().astype(int).tolist()))


def main(out: str, *films: str) -> None:
    """Read them from their first to their last frame: looking for one, it misses some of cut films."""
    from torchcodec.decoders import VideoDecoder

    found = {}
    for film in films:
        decoder = VideoDecoder(film, seek_mode="exact", num_ffmpeg_threads=1)
        told = decoder.metadata
        found[f"{film} told"] = np.array([told.num_frames, told.duration_seconds, told.average_fps])
        try:
            pixels = decoder.get_frames_in_range(0, told.num_frames).data.numpy()
        except RuntimeError:
            continue
        found[f"{film} pixels"] = pixels[chosen(told.num_frames)].transpose(0, 2, 3, 1)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
