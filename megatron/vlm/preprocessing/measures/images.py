"""Images and videos of a line, measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.vlm.data.media.video_sounds import token_turns
from megatron.vlm.data.media.videos import video_facts
from megatron.vlm.preprocessing.line_media import LineMedia
from megatron.vlm.preprocessing.measures.frames import decode, located
from megatron.vlm.preprocessing.measures.sounds import sound_of
from megatron.vlm.preprocessing.record_media import VideoReference
from megatron.vlm.preprocessing.shorten import HeardVideo, ImageFile
from omnibal_ext.errors import Rejected
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.towers.video_rules import choose_frames, frame_grid
from omnibal_ext.modalities.vision.tiling import TiledImage, VideoFrames


def image(line: LineMedia, reference: str) -> ImageFile:
    """Measure an image: size and CRC-32; by its header alone if that is enough, or it is large. Raises `Rejected`."""
    path, file, place = line.found(reference, "image")
    return ImageFile(path, line.size(file, place), place, line.crcs([file], place, "image"))


def video(line: LineMedia, reference: VideoReference) -> TiledImage | HeardVideo:
    """Measure a video: its sampled frames and grid, which do not depend on other images, and, if it has some and that
    is heard, its sound. Raises `Rejected`."""
    rule = line.recipe.video
    assert rule is not None
    if rule.refused:
        raise Rejected("unsupported_media", rule.refused)
    found = located(line, reference)
    path, file, place = found[0]
    if reference.times:
        film = choose_frames(rule, reference.times, reference.rate, files=[path for path, *_ in found])
        files, has_sound = [line.root / name for name in film.files], False
        path, size = film.files[0], _size_of_frames(line, files)
    else:
        facts = line.once(video_facts, file, place, line.recipe.max_pixels)
        film, size = choose_frames(rule, facts.times, facts.rate, facts.seconds), facts.size
        files, has_sound = [file], facts.has_sound
        if line.recipe.decode_images:
            line.once(decode, file, place, film.frames)
    columns, rows = frame_grid(rule, len(film.frames), size, line.recipe.tiling.tile_size)
    seen = TiledImage(path, columns, rows, False, place=place, film=film, crcs=line.crcs(files, place, "video"))
    return _with_sound(line, seen, film, file) if line.heard and has_sound else seen


def _size_of_frames(line: LineMedia, files: Sequence[Path]) -> tuple[int, int]:
    sizes = {line.size(file): file for file in files}
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise Rejected(
            "frames_differ", f"{first}: {one[0]} x {one[1]} pixels, {second}: {other[0]} x {other[1]}; scale one"
        )
    return next(iter(sizes))


def _with_sound(line: LineMedia, video: TiledImage, film: VideoFrames, file: Path) -> HeardVideo:
    clock = line.recipe.clock
    assert clock is not None
    sound = sound_of(line, video.path, file, video.place, "video")
    order = TILINGS[line.recipe.tiling.rule].order(video, line.recipe.tokens_per_tile)
    turns = token_turns(clock, video.steps, len(order) // video.steps, film.seconds, sound.tokens)
    return HeardVideo(video, replace(sound, turns=turns))
