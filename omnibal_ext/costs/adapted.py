"""Costs of a layer's adapters alone, counted from their shapes (`omnibal_ext.adapters`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from omnibal_ext.adapters import Adapters, adapted_matrices, adapter_parameters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.costs.work import BYTES, Work


@dataclass(frozen=True, slots=True)
class AdaptersWork:
    """Costs of the adapters of one layer, for a pack at the budget, on one tensor-parallel rank."""

    matrices: int
    """Matrices with an adapter."""
    weights: float
    """Parameters of the adapters."""
    operations: float
    """Of the forward; each of the two gradients takes as many."""
    forward_bytes: float
    """Read and written, apart from the adapters' own products."""
    backward_bytes: float
    kept: float
    """Bytes saved for the backward, minus those that the frozen layer no longer saves (`Work.for_weights`)."""


def adapters_works(
    architecture: Architecture, adapters: Adapters, works: Mapping[str, Work], t: int
) -> dict[str, AdaptersWork]:
    """Return the adapters' costs of one layer of each kind that has some, on one of `t` tensor-parallel ranks."""
    matrices, numbers, found = adapted_matrices(architecture), adapter_parameters(architecture, adapters, t), {}
    for kind, number in numbers.items():
        work = works[kind]
        rows, columns = (sum(getattr(matrix, side) for matrix in matrices[kind]) for side in ("rows", "columns"))
        inner = adapters.rank * sum(matrix.parts / (t if matrix.by_rows else 1) for matrix in matrices[kind])
        found[kind] = AdaptersWork(
            matrices=len(matrices[kind]),
            weights=number,
            operations=2 * work.tokens * number,
            forward_bytes=work.tokens * BYTES * (2 * rows + columns) / t,
            backward_bytes=work.tokens * BYTES * (2 * rows + 5 * columns) / t,
            kept=work.tokens * BYTES * inner - work.for_weights / work.shares(t),
        )
    return found
