"""Shapes of all our weights, from the architecture; weights of a folder are checked against them."""

from functools import lru_cache

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import chain_kind, layer_names, modality_of
from omnibal_ext.matrices import matrices_of
from omnibal_ext.modalities.matrix import Matrix
from omnibal_ext.modalities.registry import COUNTED
from omnibal_ext.modalities.weights import Shape


def weight_shape(ours: str, model: Architecture) -> Shape:
    """Return a weight's unsharded shape by its name in our checkpoints, such as `links.vit_3.mlp.linear_fc1.weight`."""
    _, layer, weight = ours.split(".", 2)
    return _shapes(_cost_kinds(model)[layer], model)[weight]


@lru_cache(maxsize=16)
def _cost_kinds(model: Architecture) -> dict[str, str]:
    """Return every layer's key in tables of costs, by its name in checkpoints, such as `vit_3`."""
    names = (name.replace(".", "_") for name in layer_names(model.chain))
    return dict(zip(names, model.cost_kinds, strict=True))


@lru_cache(maxsize=16)
def _shapes(name: str, model: Architecture) -> dict[str, Shape]:
    """Return the shapes of all weights of a layer, by their names in it; `name`: its key in tables of costs."""
    found = COUNTED[modality_of(name)].weights(model, chain_kind(name), name)
    for matrix in matrices_of(model).get(name, ()):
        found |= _matrix(matrix)
    return found


def _matrix(matrix: Matrix) -> dict[str, Shape]:
    if matrix.name.endswith("_weight"):
        return {matrix.name: matrix.shape}
    return {f"{matrix.name}.weight": matrix.shape, f"{matrix.name}.bias": matrix.shape[:-1]}
