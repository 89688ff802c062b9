"""Work of layers, counted from a model's shapes: operations, memory traffic, bytes kept.

For n tokens of width h on one of t tensor-parallel ranks with sequence parallelism:

    matrices    2 n (weights of the layer) / t operations forward, the same for each of the two gradients (Megatron-LM,
                arXiv 2104.04473, appendix)
    attention   4 h sum(len^2) / t operations forward; half under a causal mask; all under Gemma 3's masks, with or
                without sliding windows
    linear      6 k v operations a token and head of linear attention with a k x v state, plus those within a chunk;
                proportional to n
    experts     an MLP's work for each chosen expert, plus copies of tokens sorted by expert; weights of all experts
    memory      elementwise operations read and write the hidden states, n h 2 / t bytes, `work.passes` times
    kept        the tensors listed in `work.kept`, as in arXiv 2205.05198 section 4 without dropout and stored scores;
                tests/shapes/test_shapes.py counts them on a device of shapes
    cheap       those of them that elementwise operations recompute: outputs of norms (h each) and of the activation
                function. A norm reads and writes the hidden states, the activation its input and output
    late        from B to W of a split backward: input and output gradient of every linear layer. With sequence
                parallelism one of the two is sharded, the other gathered: Transformer Engine gathers inputs in B and
                holds them; core's own layers gather them again in W and hold less
    projector   every rank has the inputs and outputs of all image tokens; only the MLP's inner activations are sharded
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omnibal_ext.adapters import Adapters, adapted_matrices, adapter_parameters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.modality import MODALITIES, Size
from omnibal_ext.modalities.registry import COUNTED
from omnibal_ext.modalities.work import BYTES, Work


def layer_works(architecture: Architecture, units: Mapping[Size, int], t: int, e: int = 1) -> dict[str, Work]:
    """Return the work of one layer of each kind, by its key in `Profile.layers`, on a pack of `units` by size (default:
    1).

    It is that of all `t` tensor-parallel ranks together, with sequence parallelism. Experts are sharded over these
    ranks, or for `e` above 1 whole experts are distributed over `e` ranks, to which tokens are sent.

    Heads that `t` does not divide are padded with zeros. If `t` does not divide the ViT's tokens, the attention's
    output is kept once more, padded.
    """
    units = {one.size: units.get(one.size, 1) for one in MODALITIES}
    found: dict[str, Work] = {}
    for modality in architecture.modalities:
        found |= COUNTED[modality].works(architecture, units, t, e)
    return found


@dataclass(frozen=True, slots=True)
class AdaptersWork:
    """Costs of the adapters of one layer, for a pack at the budget, on one tensor-parallel rank."""

    matrices: int
    """Matrices with an adapter."""
    weights: float
    """Parameters of the adapters."""
    operations: float
    """Operations of the forward; each of the two gradients takes as many."""
    forward_bytes: float
    """Bytes read and written, apart from the adapters' own products."""
    backward_bytes: float
    kept: float
    """Bytes saved for the backward, minus those that the frozen layer no longer saves (`Work.for_weights`)."""


def adapters_works(
    architecture: Architecture, adapters: Adapters, works: Mapping[str, Work], t: int
) -> dict[str, AdaptersWork]:
    """Return the adapters' work in one layer of each kind that has some, on one of `t` tensor-parallel ranks."""
    matrices, numbers, found = adapted_matrices(architecture), adapter_parameters(architecture, adapters, t), {}
    for kind, number in numbers.items():
        work = works[kind]
        rows, columns = (sum(getattr(matrix, side) for matrix in matrices[kind]) for side in ("rows", "columns"))
        inner = adapters.rank * sum(matrix.fused / (t if matrix.by_rows else 1) for matrix in matrices[kind])
        found[kind] = AdaptersWork(
            matrices=len(matrices[kind]),
            weights=number,
            operations=2 * work.tokens * number,
            forward_bytes=work.tokens * BYTES * (2 * rows + columns) / t,
            backward_bytes=work.tokens * BYTES * (2 * rows + 5 * columns) / t,
            kept=work.tokens * BYTES * inner - work.for_weights / work.shares(t),
        )
    return found
