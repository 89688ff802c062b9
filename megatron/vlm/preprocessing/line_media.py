"""Images, videos and sounds of one line: found, measured and checked, each once however often it is named."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from megatron.vlm.data.formats.places import embedded
from megatron.vlm.data.formats.rows import PartSource, Row
from megatron.vlm.data.media.crc import crc_of
from megatron.vlm.data.media.images import glance, image_size, path_below_root
from megatron.vlm.data.media.sounds import sound_length
from megatron.vlm.data.media.video_sounds import token_turns
from megatron.vlm.data.media.videos import read_frames, video_facts
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.record_media import VideoReference
from megatron.vlm.preprocessing.shorten import HeardVideo, ImageFile
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.towers.video_rules import choose_frames, frame_grid
from omnibal_ext.modalities.audio.sounds import Sound
from omnibal_ext.modalities.place import Place
from omnibal_ext.modalities.vision.tiling import TiledImage, VideoFrames

Value = TypeVar("Value")


class LineMedia:
    """What a row of `source` (which may set an image root) names. All raise `Rejected`."""

    def __init__(self, recipe: Recipe, row: Row, source: PartSource | None) -> None:
        self.recipe, self.row, self.source = recipe, row, source
        self._root = (source and source.root) or recipe.image_root or Path()
        self._known: dict[Any, Any] = {}
        self._sizes: dict[tuple[Path, Place], tuple[int, int]] = {}
        self._not_decoded: list[tuple[Path, Place]] = []

    def image(self, reference: str) -> ImageFile:
        """An image, measured: by its header alone if it is large."""
        path, file, place = self._found(reference, "image")
        return ImageFile(path, self._size(file, place), place, self._crcs([file], place, "image"))

    def film(self, reference: VideoReference, heard: bool) -> TiledImage | HeardVideo:
        """A video with its sampled frames and grid, which do not depend on other images, and, if it has some and that
        is to be `heard`, its sound."""
        rule = self.recipe.video
        assert rule is not None
        if rule.refused:
            raise Rejected("unsupported_media", rule.refused)
        located = [self._found(file, "video") for file in reference.files]
        path, file, place = located[0]
        if reference.times:
            if any(place for *_, place in located):
                raise Rejected(
                    "unsupported_media", "frames inside a file; a video inside it, or frames next to it, are read"
                )
            film = choose_frames(rule, reference.times, reference.rate, files=[path for path, *_ in located])
            files, has_sound = [self._root / name for name in film.files], False
            path, size = film.files[0], self._size_of_frames(files)
        else:
            facts = self._once(video_facts, file, place, self.recipe.max_pixels)
            film, size = choose_frames(rule, facts.times, facts.rate, facts.seconds), facts.size
            files, has_sound = [file], facts.has_sound
            if self.recipe.decode_images:
                self._once(_decode, file, place, film.frames)
        columns, rows = frame_grid(rule, len(film.frames), size, self.recipe.tiling.tile_size)
        video = TiledImage(path, columns, rows, False, place=place, film=film, crcs=self._crcs(files, place, "video"))
        return self._with_sound(video, film, file) if heard and has_sound else video

    def sound(self, reference: str) -> Sound:
        """A sound, measured."""
        path, file, place = self._found(reference, "audio")
        return self._sound(path, file, place, "audio")

    def decode_the_rest(self) -> bool:
        """Decode the images that were not yet; return whether one is turned otherwise than its header said."""
        is_turned = False
        for file, place in self._not_decoded:
            size = image_size(file, self.recipe.max_pixels, self.recipe.decode_images, place)
            is_turned |= size != self._sizes[file, place]
            self._sizes[file, place] = size
        self._not_decoded.clear()
        return is_turned

    def _found(self, reference: str, what: str) -> tuple[str, Path, Place]:
        path, place = locate(reference, self.row, self._root, what)
        if place:
            return path, self.source.file if self.source else self._root / path, place
        path = self._once(written_as, self._root, path, what, reference.startswith("file://"))
        return path, self._root / path, place

    def _once(self, work: Callable[..., Value], *words: Any) -> Value:
        key = (work, words)
        if key not in self._known:
            self._known[key] = work(*words)
        value: Value = self._known[key]
        return value

    def _size(self, file: Path, place: Place) -> tuple[int, int]:
        if (file, place) not in self._sizes:
            size, is_whole = glance(file, self.recipe.max_pixels, self.recipe.decode_images, place)
            self._sizes[file, place] = size
            if not is_whole:
                self._not_decoded.append((file, place))
        return self._sizes[file, place]

    def _size_of_frames(self, files: Sequence[Path]) -> tuple[int, int]:
        sizes = {self._size(file, ()): file for file in files}
        if len(sizes) > 1:
            (one, first), (other, second) = list(sizes.items())[:2]
            raise Rejected(
                "frames_differ", f"{first}: {one[0]} x {one[1]} pixels, {second}: {other[0]} x {other[1]}; scale one"
            )
        return next(iter(sizes))

    def _crcs(self, files: Sequence[Path], place: Place, what: str) -> tuple[int, ...]:
        if not self.recipe.image_checksums:
            return ()
        try:
            return tuple(self._once(crc_of, file, place) for file in files)
        except (OSError, UserError, ValueError) as error:  # changed since it was measured
            raise Rejected(f"unreadable_{what}", str(error)[:200]) from error

    def _with_sound(self, video: TiledImage, film: VideoFrames, file: Path) -> HeardVideo:
        clock = self.recipe.clock
        assert clock is not None
        sound = self._sound(video.path, file, video.place, "video")
        order = TILINGS[self.recipe.tiling.rule].order(video, self.recipe.tokens_per_tile)
        turns = token_turns(clock, video.steps, len(order) // video.steps, film.seconds, sound.tokens)
        return HeardVideo(video, replace(sound, turns=turns))

    def _sound(self, path: str, file: Path, place: Place, what: str) -> Sound:
        rule = self.recipe.audio
        assert rule is not None
        samples = self._once(sound_length, file, place, rule.rate, self.recipe.decode_images)
        if not (tokens := rule.tokens(samples)):
            raise Rejected("too_short_audio", f"{file}: {samples / rule.rate:.3f} seconds are too short to be heard")
        return Sound(path, samples, rule.frames(samples), tokens, place, self._crcs([file], place, what))


def written_as(root: Path, path: str, what: str, is_url: bool) -> str:
    """Return `path` as the file below `root` is called: with letters composed or decomposed (NFC, NFD), or with %20 and
    the like decoded. A path that no such file has is returned as it is.

    Raises `Rejected` (missing_image; `what` in place of image) if only the decoded path exists, and it is no URL.
    """
    if (path.isascii() and "%" not in path) or _is_there(root / path):
        return path
    forms = [unicodedata.normalize(form, path) for form in ("NFC", "NFD")]
    if decoded := "%" in path:
        forms.append(path_below_root(unquote(path)))
    found = next((other for other in forms if _is_there(root / other)), path)
    if decoded and found == forms[-1] != path and not is_url:
        raise Rejected(f"missing_{what}", f"{path}: no such file; {found!r} is there: write it so, or as file://...")
    return found


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long, a folder of others: opening it says so
        return False


def _decode(file: Path, place: Place, numbers: Sequence[int]) -> None:
    try:
        for _ in read_frames(file, place, numbers, strict=True):
            pass
    except Exception as error:  # a broken file makes FFmpeg raise nearly anything
        raise Rejected("truncated_video", f"{file}: {str(error)[:200]}") from error


def locate(reference: str, row: Row, root: Path, what: str = "image") -> tuple[str, Place]:
    """(path below the root, ()) of an image or video file, or (name, place) of one inside the input file.

    Raises `Rejected`: remote_image, unreadable_image (`what` in place of image), path_outside_root.
    """
    if reference in row.images:
        return reference, row.images[reference]
    if reference.startswith("data:"):
        place = embedded(reference, row)
        if place is None:
            raise Rejected(
                f"unreadable_{what}", f"{reference[:40]!r}... is no base64 that stands in the file unescaped"
            )
        return "", place
    if reference.startswith(("http://", "https://")):
        raise Rejected(f"remote_{what}", f"{reference[:200]!r}: nothing is downloaded; fetch it and name the file")
    path = reference.removeprefix("file://")
    for folder in (root.absolute(), root.resolve()) if path.startswith("/") else ():
        path = path.removeprefix(f"{str(folder).rstrip('/')}/")
    return path_below_root(path), ()
