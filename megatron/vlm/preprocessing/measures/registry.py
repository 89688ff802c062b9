"""The registry of measures: of each kind of media in records, and of the rules of modalities beyond images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.kinds import FILMS, IMAGES, SOUNDS, VIDEOS, Kind
from megatron.vlm.preprocessing.line_media import LineMedia
from megatron.vlm.preprocessing.measures import films, images, sounds
from megatron.vlm.preprocessing.shorten import Measured
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.item import Rule
from omnibal_ext.modalities.modality import AUDIO, FILM, Modality

MEASURES: Mapping[Kind, Callable[[LineMedia, Any], Measured]] = {
    IMAGES: images.image,
    VIDEOS: images.video,
    SOUNDS: sounds.sound,
    FILMS: films.film,
}
"""Measures by kind: from a line and what it names. All raise `Rejected`."""


@dataclass(frozen=True)
class RuleReader:
    """How to find the `Rule` by which a model with an encoder of this modality reads inputs."""

    of_model: Callable[[Architecture], Rule]
    in_folder: Callable[[Path, Any], tuple[Rule, str]]
    """Function from the model's folder and that rule to the rule, and the file that says it. Raises UserError naming a
    field that is not supported."""


RULES: Mapping[Modality, RuleReader] = {
    AUDIO: RuleReader(sounds.rule_of, sounds.rule_in),
    FILM: RuleReader(films.rule_of, films.rule_in),
}
