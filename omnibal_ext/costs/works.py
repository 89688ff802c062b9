"""Counts the work of layers from a model's shapes: operations, memory traffic, bytes kept.

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
from omnibal_ext.architectures.layer import Layer
from omnibal_ext.architectures.vision import VisionArchitecture
from omnibal_ext.chain import chain_kind
from omnibal_ext.costs.audio_works import audio_works
from omnibal_ext.costs.language_works import language_work
from omnibal_ext.costs.vit_works import vit_work
from omnibal_ext.costs.work import BYTES, Work
from omnibal_ext.matrices import matrices_of

IMAGE_PATCHES = 2304
"""Patches of the image that attention at native resolution is counted for: 672 x 672 pixels."""


def layer_works(
    architecture: Architecture, tiles: int, tokens: int, t: int, e: int = 1, frames: int = 1
) -> dict[str, Work]:
    """Return the work of one layer of each kind, by its key in `Profile.layers`; `frames`: mel frames of a sound.

    Of all `t` tensor-parallel ranks together, with sequence parallelism. Experts are sharded over these ranks, or for
    `e` above 1 whole experts are distributed over `e` ranks, to which tokens are sent.

    Heads that `t` does not divide are padded with zeros. If `t` does not divide the ViT's tokens, the attention's
    output is kept once more, padded.
    """
    vision, language = architecture.vision, architecture.language
    h, g, tile = vision.hidden_size, language.hidden_size, vision.tokens_per_tile
    pixels, words, learned_positions = 3 * vision.patch_size**2, language.vocab_size * g, tile * h
    around = 0  # numbers kept for a patch's interpolated positions: indices and weights
    if vision.native:
        around = vision.native.around * 10
        learned_positions = ((vision.native.learned_positions or 0) ** 2 + 2 * (vision.native.axis_positions or 0)) * h
        pixels *= vision.native.frames
    norms, normed = (2 * pixels + 5 * h, pixels + 2 * h) if vision.embedding_norms else (0, 0)  # and a bias
    vit_tokens, image_tokens = tiles * tile, architecture.image_tokens(tiles)
    layers = dict.fromkeys(zip(architecture.cost_kinds, architecture.layers, strict=True))
    seen = image_tokens * architecture.streams + (architecture.audio.tokens(frames) if architecture.audio else 0)
    weights = sum(matrix.weights for matrix in matrices_of(architecture, t).get("vit", ()))
    return {
        **audio_works(architecture, frames, t),
        "patch_embed": Work(
            pixels * h + learned_positions + norms, pixels * h, vit_tokens, h,
            vit_tokens * (pixels + h * vision.pre_norm + around + normed) * BYTES, copies=True,
            input_gradient=vision.embedding_norms,
            passes=2 + vision.embedding_norms * (4 + 2 * pixels / h),
        ),
        **{
            name: vit_work(vision, weights, vit_tokens, tiles * _attended(vision, bool(full)), t)
            for name, full in layers if chain_kind(name) == "vit"
        },
        "projector": projector_work(architecture, tiles, t),
        "word_embed": Work(words, 0, tokens, g, (tokens * 8 + seen * g * BYTES) * t),
        **{name: language_work(language, one, tokens, t, e) for name, one in layers if isinstance(one, Layer)},
        # Every rank has the hidden states of all supervised tokens.
        "head": Work(
            words + g, words, tokens, g, tokens * (g + g * t + language.vocab_size) * BYTES,
            tokens * (g * t + language.vocab_size) * BYTES,
        ),
    }  # fmt: skip


def _attended(vision: VisionArchitecture, sees_whole_images: bool) -> int:
    """Sum of squared sequence lengths a tile. At native resolution a tile is a patch: the patches it attends to, in
    images of `IMAGE_PATCHES` or in windows."""
    if vision.native is None:
        return vision.tokens_per_tile**2
    if sees_whole_images or not vision.native.window:
        return IMAGE_PATCHES
    return min(IMAGE_PATCHES, (vision.native.window * vision.native.merge) ** 2)


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
        whole_output=True,
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
