"""Videos of a line for models with an encoder of their own, measured, and which frames such a model sees."""

from pathlib import Path

from megatron.vlm.data.media.videos import video_facts
from megatron.vlm.preprocessing.line_media import LineMedia
from megatron.vlm.preprocessing.measures.frames import decode, located
from megatron.vlm.preprocessing.record_media import VideoReference
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG
from omnibal_ext.modalities.film.architecture import Film, FilmArchitecture, FilmRule
from omnibal_ext.modalities.modality import FILM


def film(line: LineMedia, reference: VideoReference) -> Film:
    """Measure a video: the frames that are seen, their tokens and CRC-32s. Raises `Rejected`."""
    rule = line.recipe.rules[FILM]
    assert isinstance(rule, FilmRule)
    found = located(line, reference)
    path, file, place = found[0]
    if not reference.times:
        frames = rule.chosen(line.once(video_facts, file, place, line.recipe.max_pixels).frames)
        if line.recipe.decode_images:
            line.once(decode, file, place, tuple(dict.fromkeys(frames)))
        return Film(path, frames, len(frames) * rule.tokens, (), place, line.crcs([file], place, "video"))
    frames = rule.chosen(len(found))
    paths, files = [found[frame][0] for frame in frames], [found[frame][1] for frame in frames]
    for one in files:
        line.size(one)
    return Film(paths[0], frames, len(frames) * rule.tokens, tuple(paths), (), line.crcs(files, (), "video"))


def rule_of(model: Architecture) -> FilmRule:
    """Return the rule that says which frames of a video are seen, for a model with a separate encoder of videos."""
    vision = FilmArchitecture.among(model.further).as_vit
    return FilmRule(vision.image_size, vision.tokens_per_tile)


def rule_in(folder: Path, rule: FilmRule) -> tuple[FilmRule, str]:
    """Return the rule as it is, and config.json as its origin: the folder's processor says nothing of it."""
    return rule, CONFIG
