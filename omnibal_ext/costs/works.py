"""What layers ask for, counted from a model's shapes: operations, memory traffic, bytes kept.

For n tokens of width h on one of t tensor-parallel ranks with sequence parallelism:

    matrices    2 n (weights of the layer) / t operations forward, the same for each of the two gradients (Megatron-LM,
                arXiv 2104.04473, appendix)
    attention   4 h sum(len^2) / t operations forward, half of it under a causal mask, all of it under the masks of
                Gemma 3, whose layers with windows and without are priced alike
    experts     as perceptrons, for each token those it goes through, and the copies of it that are sorted by expert;
                weights are those of all
    memory      elementwise operations read and write the stream of n h 2 / t bytes as often as `_passes` counts
    kept        the tensors listed in `_kept`, as in arXiv 2205.05198 section 4 without dropout and stored scores;
                tests/shapes/test_shapes.py counts them on a device of shapes
    cheap       of them the outputs of norms (h each) and of the activation function, which elementwise operations give
                again: a norm reads and writes the stream, the activation what goes in and out of it
    late        from B to W of a split backward: input and output gradient of every linear layer. Under sequence
                parallelism each is a share of one side and whole on the other, which Transformer Engine gathers in B
                and holds; without it inputs are gathered again in W, and less is held
"""

from dataclasses import dataclass, replace

from omnibal_ext.architectures.architecture import Architecture, Experts, NativeResolution, VisionArchitecture
from omnibal_ext.chain import FULL

BYTES = 2  # of a bf16 number
IMAGE_PATCHES = 2304
"""Patches of an image at native resolution that attention is counted for: 672 x 672 pixels."""
SCORES = 2
"""fp32 numbers a token and expert that a router's backward needs: how likely it is for the choice, and for the balance.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """One layer of a kind at the budget, of all tensor-parallel ranks together; or, of `copies`, of each of them."""

    parameters: int
    matrix_weights: int
    """Parameters that every token is multiplied with."""
    tokens: int
    width: int
    kept: float
    """Bytes saved for the backward."""
    late: float = 0.0
    """Bytes held from B to W; 0: B computes the gradients of all weights."""
    cheap: float = 0.0
    """Bytes of `kept` that elementwise operations give again."""
    cheap_passes: float = 0.0
    """Reads and writes of the stream by these."""
    attention: float = 0.0
    """Operations forward."""
    per_square: float = 0.0
    """Attention operations for each token squared, where samples share a pack; 0 where attention grows with tiles."""
    passes: float = 2.0
    """Reads and writes of the stream by elementwise operations, forward."""
    blocks: int = 0
    """Tensor-parallel blocks (attention, MLP) that end in an all-reduce."""
    expert_parameters: int = 0
    """Parameters of experts, among `parameters`."""
    routed: int = 0
    """Numbers a token that its experts take, and as many that they give."""
    copies: bool = False
    """Whether every tensor-parallel rank does all of it: the first link, which has no gradient of its input."""

    def shares(self, t: int) -> int:
        """Among how many of `t` tensor-parallel ranks it is divided."""
        return 1 if self.copies else t


def layer_works(architecture: Architecture, tiles: int, tokens: int, t: int, e: int = 1) -> dict[str, Work]:
    """What each kind of layer asks for, by kind: all of `t` tensor-parallel ranks together, in sequence parallelism.

    Experts are cut over them, which all take all tokens; or dealt whole over `e` ranks, to which tokens travel.

    Ranks that heads do not divide by get heads of zeros too; where the ViT's tokens do not divide, the attention's
    output is kept once more, with the rows that fill up.
    """
    vision, language = architecture.vision, architecture.language
    h, g, tile = vision.hidden_size, language.hidden_size, vision.tokens_per_tile
    heads_h, groups = h // vision.heads * vision.heads_over(t), language.groups_over(t)
    heads_g = groups * (language.heads // language.kv_heads) * language.head_dim
    key_value = 2 * groups * language.head_dim
    vit_matrices = 2 + vision.gated
    vit = 4 * h * heads_h + vit_matrices * h * vision.ffn_hidden_size
    attention, perceptron = g * (2 * heads_g + key_value), 3 * g * language.ffn_hidden_size
    experts, router = language.experts or Experts(1, 1), language.experts.count * g if language.experts else 0
    llm = attention + experts.chosen * perceptron + router
    shuffled, pixels, words = architecture.joined_width, 3 * vision.patch_size**2, language.vocab_size * g
    learned_positions, inner = tile * h, g
    if vision.native:
        learned_positions, inner = (vision.native.learned_positions or 0) ** 2 * h, shuffled
        pixels *= vision.native.frames
    streams = 1 + len(vision.feature_layers)  # hidden states, and features beside them
    projector = shuffled * g if architecture.pools else (shuffled * inner + inner * g) * streams
    inner *= not architecture.pools
    # Query and attention output are counted at the width of the layer, with key and value goes what they have more.
    inside_h, inside_g = 2 * heads_h + 2 * (heads_h - h), key_value + 2 * (heads_g - g)
    vit_inner, vit_others = vit_matrices * vision.ffn_hidden_size, 4 * vision.qk_norm + 4 * vision.layer_scale
    vit_passes = _passes(h, inside_h, vit_inner, vit_others)
    rotated = heads_g + key_value // 2  # query and key, which are also what QK-norm normalises
    llm_others = (2 + 2 * language.qk_norm) * rotated / g + 4 * language.branch_norms
    llm_inner = experts.chosen * 3 * language.ffn_hidden_size
    sorted_tokens = experts.chosen * g if language.experts else 0  # a copy for each of a token's experts
    dealt = e > 1
    copies = sorted_tokens * (1 if dealt else t)  # of all ranks; dealt ones are sorted again where they have come
    llm_passes = _passes(g, inside_g, llm_inner, llm_others + (8 if dealt else 4) * sorted_tokens / g)
    norms = 2 * g * (1 + language.branch_norms) + 2 * language.head_dim * language.qk_norm
    vit_kept = _kept(h, inside_h, vit_inner, 2 * h * vision.qk_norm, vision.layer_scale)
    repeated = (2 * heads_g - key_value) * language.image_attention  # under a mask every head has its key and value
    llm_kept = _kept(g, inside_g + repeated, llm_inner, rotated * language.qk_norm + 2 * g * language.branch_norms)
    llm_kept += copies + 2 * SCORES * bool(language.experts) * experts.count
    vit_tokens, image_tokens = tiles * tile, architecture.image_tokens(tiles)
    vit_kept += heads_h * (vit_tokens % t > 0)
    # Every rank has all image tokens around the projector, and all supervised ones in front of the head.
    normed = architecture.projector_norm or vision.native is not None
    before_projector = vit_tokens * h * vision.final_norm + image_tokens * shuffled * (1 + normed)
    # Of four linear layers: query, key, value and attention output; MLP; whole on every rank what ranks have shares of.
    vit_late = 4 * heads_h + vit_inner + 4 * h * t
    # Routers and sorted copies keep what the norm in front of experts gives, and so does each expert.
    vit_cheap, llm_cheap = 2 * h + vision.ffn_hidden_size, 2 * g + language.ffn_hidden_size
    llm_cheap_passes = _cheap_passes(g, llm_inner)
    if language.experts:
        llm_cheap, llm_cheap_passes = g, 2.0
    llm_late = 2 * heads_g + key_value + llm_inner + (2 * copies + 2 * g * t if language.experts else 4 * g * t)
    return {
        "patch_embed": Work(
            pixels * h + learned_positions, pixels * h, vit_tokens, h,
            vit_tokens * (pixels + h * vision.pre_norm) * BYTES, copies=True,
        ),
        "vit": Work(
            vit + 4 * h, vit, vit_tokens, h, vit_tokens * vit_kept * BYTES,
            vit_tokens * vit_late * BYTES, attention=4 * heads_h * tiles * _attended(vision), passes=vit_passes,
            blocks=2, cheap=vit_tokens * vit_cheap * BYTES, cheap_passes=_cheap_passes(h, vit_inner),
        ),
        "projector": Work(
            projector, projector, image_tokens, g, (before_projector * t + image_tokens * 2 * inner) * streams * BYTES,
            image_tokens * (2 * inner + (shuffled + g) * t) * streams * BYTES,
        ),
        "word_embed": Work(words, 0, tokens, g, (tokens * 8 + image_tokens * g * streams * BYTES) * t),
        "llm": Work(
            attention + experts.count * perceptron + router + norms, llm, tokens, g, tokens * llm_kept * BYTES,
            tokens * llm_late * BYTES, attention=2 * heads_g * tokens**2,
            per_square=2 * heads_g, passes=llm_passes, blocks=2, cheap=tokens * llm_cheap * BYTES,
            cheap_passes=llm_cheap_passes, routed=sorted_tokens,
            expert_parameters=experts.count * perceptron if language.experts else 0,
        ),
        "head": Work(
            words + g, words, tokens, g, tokens * (g + g * t + language.vocab_size) * BYTES,
            tokens * (g * t + language.vocab_size) * BYTES,
        ),
    }  # fmt: skip


def _attended(vision: VisionArchitecture) -> float:
    """Sum of squared lengths of attention a tile; at native resolution a patch, in images of `IMAGE_PATCHES`, a mean of
    the layers with windows and those without."""
    if vision.native is None:
        return vision.tokens_per_tile**2
    whole = len(vision.full_layers) / vision.layers
    return whole * IMAGE_PATCHES + (1 - whole) * _window(vision.native)


def _window(native: NativeResolution) -> float:
    """Patches that a patch sees in the layers that are not `full_layers`."""
    return min(IMAGE_PATCHES, (native.window * native.merge) ** 2) if native.window else IMAGE_PATCHES


def cost_works(architecture: Architecture, tiles: int, tokens: int, t: int, e: int = 1) -> dict[str, Work]:
    """`layer_works`, with both kinds of ViT layers behind their mean where some see windows and some whole images."""
    works, vision = layer_works(architecture, tiles, tokens, t, e), architecture.vision
    if vision.full_layers:
        assert vision.native is not None
        mean, a_patch = works["vit"], works["vit"].attention / _attended(vision)
        reach = {"vit": _window(vision.native), FULL: IMAGE_PATCHES}
        works |= {kind: replace(mean, attention=a_patch * seen) for kind, seen in reach.items()}
    return works


def _passes(h: int, key_value: int, activations: int, others: float) -> float:
    """Reads and writes of n h numbers, unfused: two norms (4), two residuals (6), attention in and out (2 and key and
    value), the activation function in and out; `others`: norm of query and key (4), of both branches (4), LayerScale
    (4), or rotation."""
    return 4 + 6 + 2 + (key_value + activations) / h + others


def _cheap_passes(h: int, activations: int) -> float:
    """Of `_passes` those of two norms and of the activation function, in and out."""
    return 4 + activations / h


def _kept(h: int, key_value: int, activations: int, normed: int = 0, layer_scale: bool = False) -> int:
    """Numbers a token that a layer's backward needs.

    The inputs of both norms, of QKV and of the MLP (4 h); query and attention output (2 h); key and value; what goes in
    and out of the activation function; query and key before their norm, branches before theirs (`normed`); branches
    before LayerScale (2 h).
    """
    return 6 * h + key_value + activations + normed + 2 * h * layer_scale
