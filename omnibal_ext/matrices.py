"""The linear layers of every kind of layer: shape, tensor-parallel split, and whether it gets an adapter.

Used for shapes of weights (`megatron.vlm.hf.shapes`), adapters (`omnibal_ext.adapters`) and costs
(`omnibal_ext.costs.works`).
"""

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.families.registry import MODEL_TYPES, MODELS
from omnibal_ext.modalities.matrix import Matrix, Stored
from omnibal_ext.modalities.modality import Modality
from omnibal_ext.modalities.registry import COUNTED

QKV = "self_attention.linear_qkv.weight"


def matrices_of(model: Architecture, ranks: int = 1) -> dict[str, tuple[Matrix, ...]]:
    """Return the unsharded weight matrices of one layer of each kind, by its cost key (`chain.cost_kinds`).

    Heads and groups of heads are padded to divide over `ranks` tensor-parallel ranks.
    """
    found: dict[str, tuple[Matrix, ...]] = {}
    for modality in model.modalities:
        found |= COUNTED[modality].matrices(model, ranks, _stored(model, modality))
    return found


def _stored(model: Architecture, modality: Modality) -> Stored:
    tower, words = MODELS[model.types[0]].model_type.weights, MODEL_TYPES[model.types[1]].weights
    qkv = [one.theirs for one in tower if (one.kind, one.ours) == (modality.kinds[1], QKV)]
    gate_and_up = [one.theirs for one in words if one.ours == "mlp.linear_fc1.weight"]
    return Stored(
        bool(qkv) and all(len(theirs) == 1 for theirs in qkv), any(len(theirs) == 1 for theirs in gate_and_up)
    )
