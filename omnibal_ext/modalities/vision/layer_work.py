"""Counts the work of one ViT layer, or of one layer of an encoder like a ViT."""

from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.modalities.work import BYTES, Work, cheap_passes, kept, passes


def vit_work(vision: VisionArchitecture, weights: int, tokens: int, pairs: int, t: int) -> Work:
    """Return the work of a ViT layer on `tokens` rows, for `t` tensor-parallel ranks; `weights`: parameters of its
    matrices, `pairs`: the sum of squared lengths of sequences whose rows attend to each other."""
    h, inner = vision.hidden_size, (2 + vision.gated) * vision.ffn_hidden_size
    heads_h = h // vision.heads * vision.heads_over(t)
    # `kept` counts query and attention output at width h; what padded heads add to them is counted with key and value.
    inside_h = 2 * heads_h + 2 * (heads_h - h)
    normed = 2 * (vision.qk_norm or vision.query_key_norms) + 3 * vision.head_norms
    others = 2 * normed + 4 * vision.layer_scale + 4 * vision.branch_norms
    numbers = kept(h, inside_h, inner, (normed + 2 * vision.branch_norms) * h, vision.layer_scale)
    # Inputs and outputs of clamps; the one at the activation function is fused with it.
    clamped = 4 * (h + heads_h) * vision.clipped
    numbers += clamped + heads_h * (tokens % t > 0)
    # Four linear layers: query, key, value and attention output; MLP; hidden states gathered on every rank (t).
    late = 4 * heads_h + inner + 4 * h * t
    return Work(
        weights + 4 * h, weights, tokens, h, tokens * numbers * BYTES,
        tokens * late * BYTES, attention=4 * heads_h * pairs,
        passes=passes(h, inside_h, inner, others) + 2 * clamped / h, blocks=2,
        cheap=tokens * (2 * h * (1 + vision.clipped) + vision.ffn_hidden_size) * BYTES,
        cheap_passes=cheap_passes(h, inner) + 4 * vision.clipped,
        for_weights=tokens * 2 * h * vision.layer_scale * BYTES,
    )  # fmt: skip
