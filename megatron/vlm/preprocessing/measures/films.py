"""Videos of a line for models with an encoder of their own, measured, and which frames such a model sees."""

from pathlib import Path

from megatron.vlm.data.media.videos import read_frames, video_facts
from megatron.vlm.preprocessing.line_media import LineMedia
from megatron.vlm.preprocessing.record_media import VideoReference
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG
from omnibal_ext.errors import Rejected
from omnibal_ext.modalities.film.architecture import Film, FilmArchitecture, FilmRule
from omnibal_ext.modalities.modality import FILM
from omnibal_ext.modalities.place import Place


def film(line: LineMedia, reference: VideoReference) -> Film:
    """Measure a video. Raises `Rejected`."""
    rule = line.recipe.rules[FILM]
    assert isinstance(rule, FilmRule)
    located = [line.found(file, "video") for file in reference.files]
    path, file, place = located[0]
    if not reference.times:
        frames = rule.chosen(line.once(video_facts, file, place, line.recipe.max_pixels).frames)
        if line.recipe.decode_images:
            line.once(_decode, file, place, tuple(dict.fromkeys(frames)))
        return Film(path, frames, len(frames) * rule.tokens, (), place, line.crcs([file], place, "video"))
    if any(place for *_, place in located):
        raise Rejected("unsupported_media", "frames inside a file; a video inside it, or frames next to it, are read")
    frames = rule.chosen(len(located))
    paths, files = [located[frame][0] for frame in frames], [located[frame][1] for frame in frames]
    for one in files:
        line.size(one)
    return Film(paths[0], frames, len(frames) * rule.tokens, tuple(paths), (), line.crcs(files, (), "video"))


def _decode(file: Path, place: Place, numbers: tuple[int, ...]) -> None:
    try:
        for _ in read_frames(file, place, numbers, strict=True):
            pass
    except Exception as error:  # a broken file makes FFmpeg raise nearly anything
        raise Rejected("truncated_video", f"{file}: {str(error)[:200]}") from error


def rule_of(model: Architecture) -> FilmRule | None:
    """Return which frames a model sees of a video; None: it has no encoder of them."""
    found = [one.as_vit for one in model.further if isinstance(one, FilmArchitecture)]
    return FilmRule(found[0].image_size, found[0].tokens_per_tile) if found else None


def rule_in(folder: Path, rule: FilmRule) -> tuple[FilmRule, str]:
    """Return the rule, of which the folder's processor has to say nothing."""
    return rule, CONFIG
