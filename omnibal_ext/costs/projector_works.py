"""What the link between ViT and language model asks for, counted from its shapes.

Every tensor-parallel rank has all image tokens in front of and behind each of its matrices, and its share of what lies
inside a perceptron.
"""

from dataclasses import dataclass

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.costs.work import BYTES, Work
from omnibal_ext.matrices import matrices_of


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Of one token."""

    kept: int
    """That a rank's backward needs whole."""
    kept_shares: int
    """Of which ranks have shares."""
    late: int
    """From B to W, whole."""
    late_shares: int
    for_weights: int = 0
    """Of what is kept whole, inputs of matrices that have no adapters."""


def projector_work(architecture: Architecture, tiles: int, t: int) -> Work:
    """At the budget, of all of `t` tensor-parallel ranks together."""
    tokens, out = architecture.image_tokens(tiles), architecture.language.hidden_size
    count = {"matrix": _matrix, "gated": _gated}.get(architecture.merger, _plain)
    one, streams = count(architecture), architecture.streams  # hidden states, and features
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
        return _Numbers(into, 0, joined, out)  # its gradient is a share, as it is cut by its columns
    inner = joined if native else out
    return _Numbers(into, 2 * inner, joined + out, 2 * inner)


def _matrix(architecture: Architecture) -> _Numbers:
    """A norm, a matrix from a square to a patch, a perceptron of two layers."""
    joined, out, width = architecture.joined_width, architecture.language.hidden_size, architecture.vision.hidden_size
    return _Numbers(2 * joined + width, 2 * out, joined + width + out, width + 2 * out, joined)


def _gated(architecture: Architecture) -> _Numbers:
    """Behind the ViT's norm a matrix from a square to a token, another, a norm, GELU, a gated perceptron."""
    joined, out, inner = architecture.joined_width, architecture.language.hidden_size, architecture.merger_width
    kept, late = (joined + 4 * out, 3 * inner), (joined + 3 * out, 2 * out + 3 * inner)
    return _Numbers(*kept, *late, joined + out)
