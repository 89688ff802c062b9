"""The registry of what is counted of each modality's layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnibal_ext.modalities.audio import matrices as audio_matrices
from omnibal_ext.modalities.audio import weights as audio_weights
from omnibal_ext.modalities.audio import works as audio_works
from omnibal_ext.modalities.film import counted as film
from omnibal_ext.modalities.language import matrices as language_matrices
from omnibal_ext.modalities.language import weights as language_weights
from omnibal_ext.modalities.language import works as language_works
from omnibal_ext.modalities.matrix import Matrix, Stored
from omnibal_ext.modalities.modality import AUDIO, FILM, LANGUAGE, VISION, Modality, Size
from omnibal_ext.modalities.vision import matrices as vision_matrices
from omnibal_ext.modalities.vision import weights as vision_weights
from omnibal_ext.modalities.vision import works as vision_works
from omnibal_ext.modalities.weights import Shape
from omnibal_ext.modalities.work import Work

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


@dataclass(frozen=True)
class Counted:
    """Functions that count a modality's layers: matrices, work and other weights of one layer, by cost key."""

    matrices: Callable[["Architecture", int, Stored], dict[str, tuple[Matrix, ...]]]
    """Matrices of a model, padded for so many tensor-parallel ranks."""
    works: Callable[["Architecture", Mapping[Size, int], int, int], dict[str, Work]]
    """Arguments as of `costs.works.layer_works`."""
    weights: Callable[["Architecture", str, str], dict[str, Shape]]
    """Shapes of the weights that layers of a kind, with a cost key, may have and that are no matrices."""


COUNTED: Mapping[Modality, Counted] = {
    VISION: Counted(vision_matrices.matrices, vision_works.works, vision_weights.weights),
    AUDIO: Counted(audio_matrices.matrices, audio_works.works, audio_weights.weights),
    FILM: Counted(film.matrices, film.works, film.weights),
    LANGUAGE: Counted(language_matrices.matrices, language_works.works, language_weights.weights),
}
