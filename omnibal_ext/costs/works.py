"""What layers ask for, counted from a model's shapes: operations, memory traffic, bytes kept.

For n tokens of width h on one of t tensor-parallel ranks with sequence parallelism:

    matrices    2 n (weights of the layer) / t operations forward, the same for each of the two gradients (Megatron-LM,
                arXiv 2104.04473, appendix)
    attention   4 h sum(len^2) / t operations forward, half of it under a causal mask, all of it under the masks of
                Gemma 3, whose layers with windows and without are priced alike
    linear      6 k v operations a token and head of linear attention, whose state has k x v numbers, and what its
                chunk's tokens do to each other; all of it grows with n alone
    experts     as perceptrons, for each token those it goes through, and the copies of it that are sorted by expert;
                weights are those of all
    memory      elementwise operations read and write the stream of n h 2 / t bytes as often as `work.passes` counts
    kept        the tensors listed in `work.kept`, as in arXiv 2205.05198 section 4 without dropout and stored scores;
                tests/shapes/test_shapes.py counts them on a device of shapes
    cheap       of them the outputs of norms (h each) and of the activation function, which elementwise operations give
                again: a norm reads and writes the stream, the activation what goes in and out of it
    late        from B to W of a split backward: input and output gradient of every linear layer. Under sequence
                parallelism each is a share of one side and whole on the other, which Transformer Engine gathers in B
                and holds; without it inputs are gathered again in W, and less is held
"""

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.layer import Layer
from omnibal_ext.architectures.vision import VisionArchitecture
from omnibal_ext.chain import chain_kind
from omnibal_ext.costs.language_works import language_work
from omnibal_ext.costs.projector_works import projector_work
from omnibal_ext.costs.work import BYTES, Work, cheap_passes, kept, passes
from omnibal_ext.matrices import matrices_of

IMAGE_PATCHES = 2304
"""Patches of an image at native resolution that attention is counted for: 672 x 672 pixels."""


def layer_works(architecture: Architecture, tiles: int, tokens: int, t: int, e: int = 1) -> dict[str, Work]:
    """What one layer of each kind asks for, by the name that its costs stand under.

    All of `t` tensor-parallel ranks together, in sequence parallelism.

    Experts are cut over them, which all take all tokens; or dealt whole over `e` ranks, to which tokens travel.

    Ranks that heads do not divide by get heads of zeros too; where the ViT's tokens do not divide, the attention's
    output is kept once more, with the rows that fill up.
    """
    vision, language = architecture.vision, architecture.language
    h, g, tile = vision.hidden_size, language.hidden_size, vision.tokens_per_tile
    pixels, words, learned_positions = 3 * vision.patch_size**2, language.vocab_size * g, tile * h
    around = 0  # what is kept of a patch's learned positions: their places and shares
    if vision.native:
        around = vision.native.around * 10
        learned_positions = ((vision.native.learned_positions or 0) ** 2 + 2 * (vision.native.axis_positions or 0)) * h
        pixels *= vision.native.frames
    norms, normed = (2 * pixels + 5 * h, pixels + 2 * h) if vision.embedding_norms else (0, 0)  # and a bias
    vit_tokens, image_tokens = tiles * tile, architecture.image_tokens(tiles)
    layers = dict.fromkeys(zip(architecture.cost_kinds, architecture.layers, strict=True))
    return {
        "patch_embed": Work(
            pixels * h + learned_positions + norms, pixels * h, vit_tokens, h,
            vit_tokens * (pixels + h * vision.pre_norm + around + normed) * BYTES, copies=True,
            input_gradient=vision.embedding_norms,
            passes=2 + vision.embedding_norms * (4 + 2 * pixels / h),
        ),
        **{name: _vit_work(architecture, bool(full), tiles, t) for name, full in layers if chain_kind(name) == "vit"},
        "projector": projector_work(architecture, tiles, t),
        "word_embed": Work(words, 0, tokens, g, (tokens * 8 + image_tokens * g * architecture.streams * BYTES) * t),
        **{name: language_work(language, one, tokens, t, e) for name, one in layers if isinstance(one, Layer)},
        # Every rank has all supervised tokens in front of it.
        "head": Work(
            words + g, words, tokens, g, tokens * (g + g * t + language.vocab_size) * BYTES,
            tokens * (g * t + language.vocab_size) * BYTES,
        ),
    }  # fmt: skip


def _vit_work(architecture: Architecture, sees_whole_images: bool, tiles: int, t: int) -> Work:
    """Of one layer of the ViT."""
    vision = architecture.vision
    h, vit_tokens = vision.hidden_size, tiles * vision.tokens_per_tile
    heads_h = h // vision.heads * vision.heads_over(t)
    weights = sum(matrix.weights for matrix in matrices_of(architecture, t)["vit"])
    # Query and attention output are counted at the width of the layer, with key and value goes what they have more.
    inside_h = 2 * heads_h + 2 * (heads_h - h)
    inner, normed = (2 + vision.gated) * vision.ffn_hidden_size, 2 * vision.qk_norm + 3 * vision.head_norms
    others = 2 * normed + 4 * vision.layer_scale + 4 * vision.branch_norms
    numbers = kept(h, inside_h, inner, (normed + 2 * vision.branch_norms) * h, vision.layer_scale)
    # Before and behind what is clamped; at the activation function one kernel does it.
    clamped = 4 * (h + heads_h) * vision.clipped
    numbers += clamped + heads_h * (vit_tokens % t > 0)
    # Of four linear layers: query, key, value and attention output; MLP; whole on every rank what ranks have shares of.
    late = 4 * heads_h + inner + 4 * h * t
    return Work(
        weights + 4 * h, weights, vit_tokens, h, vit_tokens * numbers * BYTES,
        vit_tokens * late * BYTES, attention=4 * heads_h * tiles * _attended(vision, sees_whole_images),
        passes=passes(h, inside_h, inner, others) + 2 * clamped / h, blocks=2,
        cheap=vit_tokens * (2 * h * (1 + vision.clipped) + vision.ffn_hidden_size) * BYTES,
        cheap_passes=cheap_passes(h, inner) + 4 * vision.clipped,
        for_weights=vit_tokens * 2 * h * vision.layer_scale * BYTES,
    )  # fmt: skip


def _attended(vision: VisionArchitecture, sees_whole_images: bool) -> float:
    """Sum of squared lengths of attention a tile; at native resolution the patches that a patch sees, in images of
    `IMAGE_PATCHES` or in windows."""
    if vision.native is None:
        return vision.tokens_per_tile**2
    if sees_whole_images or not vision.native.window:
        return IMAGE_PATCHES
    return min(IMAGE_PATCHES, (vision.native.window * vision.native.merge) ** 2)
