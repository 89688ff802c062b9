"""Counts the work of the projector from its shapes.

Every tensor-parallel rank has the inputs and outputs of all image tokens; only the MLP's inner activations are sharded.
"""

from dataclasses import dataclass

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.costs.work import BYTES, Work
from omnibal_ext.matrices import matrices_of


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Counts for one image token."""

    kept: int
    """Numbers that every rank keeps for the backward."""
    kept_shares: int
    """Numbers kept that are sharded over ranks."""
    late: int
    """Numbers that every rank holds from B to W."""
    late_shares: int
    for_weights: int = 0
    """Part of `kept`: inputs of matrices that get no adapters."""


def projector_work(architecture: Architecture, tiles: int, t: int) -> Work:
    """Return the projector's work on `tiles` tiles, of all `t` tensor-parallel ranks together."""
    tokens, out = architecture.image_tokens(tiles), architecture.language.hidden_size
    count = {"matrix": _matrix, "gated": _gated}.get(architecture.merger, _plain)
    one, streams = count(architecture), architecture.streams  # one of hidden states, one a feature layer
    weights = sum(matrix.weights for matrix in matrices_of(architecture)["projector"])
    normed = tiles * architecture.vision.tokens_per_tile * architecture.vision.hidden_size
    kept = tokens * (one.kept * t + one.kept_shares) + normed * architecture.vision.final_norm * t
    return Work(
        weights, weights, tokens, out, kept * streams * BYTES,
        tokens * (one.late * t + one.late_shares) * streams * BYTES, for_weights=tokens * one.for_weights * t * BYTES,
    )  # fmt: skip


def _plain(architecture: Architecture) -> _Numbers:
    """A norm, and one matrix or two."""
    joined, out = architecture.joined_width, architecture.language.hidden_size
    native = architecture.vision.native is not None
    into = joined * (1 + (architecture.projector_norm or native))
    if architecture.pools or architecture.merger in ("shuffled", "normed"):
        return _Numbers(into, 0, joined, out)  # output gradients are sharded by columns
    inner = joined if native else out
    return _Numbers(into, 2 * inner, joined + out, 2 * inner)


def _matrix(architecture: Architecture) -> _Numbers:
    """A norm, a matrix that merges a square of patches into one patch, an MLP of two layers."""
    joined, out, width = architecture.joined_width, architecture.language.hidden_size, architecture.vision.hidden_size
    return _Numbers(2 * joined + width, 2 * out, joined + width + out, width + 2 * out, joined)


def _gated(architecture: Architecture) -> _Numbers:
    """After the ViT's norm a matrix that merges a square into one token, a matrix, a norm, GELU, a gated MLP."""
    joined, out, inner = architecture.joined_width, architecture.language.hidden_size, architecture.merger_width
    kept, late = (joined + 4 * out, 3 * inner), (joined + 3 * out, 2 * out + 3 * inner)
    return _Numbers(*kept, *late, joined + out)
