"""Matrices, work and weights of the layers of an encoder of videos: those of a ViT for tiles.

Its last layer has no weights. The planner counts there what another encoder's projector does with its rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from omnibal_ext.modalities.film.architecture import FilmArchitecture
from omnibal_ext.modalities.matrix import APART, Matrix, Stored
from omnibal_ext.modalities.modality import FILM, VISION, Size
from omnibal_ext.modalities.vision import matrices as vision_matrices
from omnibal_ext.modalities.vision import weights as vision_weights
from omnibal_ext.modalities.vision import works as vision_works
from omnibal_ext.modalities.weights import Shape
from omnibal_ext.modalities.work import Work

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture

AS_VISION = dict(zip(FILM.kinds, VISION.kinds, strict=True))


def matrices(model: "Architecture", ranks: int, stored: Stored = APART) -> dict[str, tuple[Matrix, ...]]:
    """Return the matrices in one layer of each kind, by cost key, heads padded for `ranks` tensor-parallel ranks."""
    return {"film": vision_matrices.matrices(_as_vision(model), ranks, stored)["vit"], "film_projector": ()}


def works(model: "Architecture", units: Mapping[Size, int], t: int, e: int) -> dict[str, Work]:
    """Return the work of one layer of each kind, by cost key, on a pack of `units`, as `costs.works.layer_works`."""
    seen = vision_works.works(_as_vision(model), {**units, VISION.size: units[FILM.size]}, t, e)
    embed, layer, projector = (seen[kind] for kind in VISION.kinds)
    given = replace(projector, parameters=0, width=model.vision.hidden_size)
    return dict(zip(FILM.kinds, (embed, layer, given), strict=True))


def weights(model: "Architecture", kind: str, name: str) -> dict[str, Shape]:
    """Return {name: shape} of weights, other than matrices, that layers of a kind with cost key `name` may have."""
    return {} if kind == FILM.kinds[2] else vision_weights.weights(_as_vision(model), AS_VISION[kind], name)


def _as_vision(model: "Architecture") -> "Architecture":
    """Return the model with its video encoder in the place of its ViT, to be counted as one."""
    film = FilmArchitecture.among(model.further)
    return replace(model, vision=film.as_vit, class_token=True, further=())
