"""Counts the work of a ViT's layers from their shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnibal_ext.modalities.modality import VISION, Size
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.modalities.vision.layer_work import vit_work
from omnibal_ext.modalities.vision.matrices import matrices
from omnibal_ext.modalities.work import BYTES, Work

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture

IMAGE_PATCHES = 2304
"""Patches of the image that attention at native resolution is counted for: 672 x 672 pixels."""


def works(model: "Architecture", units: Mapping[Size, int], t: int, e: int) -> dict[str, Work]:
    """Return the work of one layer of each kind, by cost key, on a pack of `units`, as `costs.works.layer_works`."""
    vision, tiles = model.vision, units[VISION.size]
    weights = sum(matrix.weights for matrix in matrices(model, t).get("vit", ()))
    return {
        "patch_embed": _embed(vision, tiles),
        **{
            name: vit_work(vision, weights, vision.rows(tiles), tiles * _attended(vision, bool(full)), t)
            for name, full in model.kinds_apart("vit").items()
        },
        "projector": _projector(model, tiles, t),
    }  # fmt: skip


def _embed(vision: VisionArchitecture, tiles: int) -> Work:
    h, tile = vision.hidden_size, vision.tokens_per_tile
    pixels, learned_positions = 3 * vision.patch_size**2, tile * h
    around = 0  # numbers kept for a patch's interpolated positions: indices and weights
    if vision.native:
        around = vision.native.around * 10
        learned_positions = ((vision.native.learned_positions or 0) ** 2 + 2 * (vision.native.axis_positions or 0)) * h
        pixels *= vision.native.frames
    norms, normed = (2 * pixels + 5 * h, pixels + 2 * h) if vision.embedding_norms else (0, 0)  # and a bias
    rows = tiles * tile
    return Work(
        pixels * h + learned_positions + norms, pixels * h, rows, h,
        rows * (pixels + h * vision.pre_norm + around + normed) * BYTES, copies=True,
        input_gradient=vision.embedding_norms,
        passes=2 + vision.embedding_norms * (4 + 2 * pixels / h),
    )  # fmt: skip


def _attended(vision: VisionArchitecture, sees_whole_images: bool) -> int:
    """Return the sum of squared sequence lengths a tile. At native resolution a tile is a patch: the patches it attends
    to, in images of `IMAGE_PATCHES` or in windows."""
    if vision.native is None:
        return vision.tokens_per_tile**2
    if sees_whole_images or not vision.native.window:
        return IMAGE_PATCHES
    return min(IMAGE_PATCHES, (vision.native.window * vision.native.merge) ** 2)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """How many numbers a projector keeps for one image token."""

    kept: int
    """Numbers that every rank keeps for the backward."""
    kept_shares: int
    """Numbers kept that are sharded over ranks."""
    late: int
    """Numbers that every rank holds from B to W."""
    late_shares: int
    for_weights: int = 0
    """Part of `kept`: inputs of matrices that get no adapters."""


def _projector(architecture: "Architecture", tiles: int, t: int) -> Work:
    """Return the projector's work on `tiles` tiles, on all `t` tensor-parallel ranks together."""
    tokens, out = architecture.image_tokens(tiles), architecture.language.hidden_size
    count = {"matrix": _matrix, "gated": _gated}.get(architecture.merger, _plain)
    one, streams = count(architecture), architecture.streams  # one of hidden states, one a feature layer
    weights = sum(matrix.weights for matrix in matrices(architecture, 1)["projector"])
    normed = tiles * architecture.vision.tokens_per_tile * architecture.vision.hidden_size
    kept = tokens * (one.kept * t + one.kept_shares) + normed * architecture.vision.final_norm * t
    return Work(
        weights, weights, tokens, out, kept * streams * BYTES,
        tokens * (one.late * t + one.late_shares) * streams * BYTES, for_weights=tokens * one.for_weights * t * BYTES,
        whole_output=True,
    )  # fmt: skip


def _plain(architecture: "Architecture") -> _Numbers:
    """Count, for one token, a projector of a norm, and one matrix or two."""
    joined, out = architecture.joined_width, architecture.language.hidden_size
    native = architecture.vision.native is not None
    into = joined * (1 + (architecture.projector_norm or native))
    if architecture.pools or architecture.merger in ("shuffled", "normed"):
        return _Numbers(into, 0, joined, out)  # output gradients are sharded by columns
    inner = joined if native else out
    return _Numbers(into, 2 * inner, joined + out, 2 * inner)


def _matrix(architecture: "Architecture") -> _Numbers:
    """Count, for one token, a norm, a matrix that merges a square of patches into one patch, and a two-layer MLP."""
    joined, out, width = architecture.joined_width, architecture.language.hidden_size, architecture.vision.hidden_size
    return _Numbers(2 * joined + width, 2 * out, joined + width + out, width + 2 * out, joined)


def _gated(architecture: "Architecture") -> _Numbers:
    """Count, for one token behind the ViT's norm, a matrix that merges a square, a matrix, a norm, GELU, a gated
    MLP."""
    joined, out, inner = architecture.joined_width, architecture.language.hidden_size, architecture.merger_width
    kept, late = (joined + 4 * out, 3 * inner), (joined + 3 * out, 2 * out + 3 * inner)
    return _Numbers(*kept, *late, joined + out)
