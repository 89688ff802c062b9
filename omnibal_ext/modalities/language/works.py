"""Counts the work of the language model's layers: attention or linear attention, then an MLP or experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.linear_attention import LinearAttention
from omnibal_ext.modalities.language.matrices import language_layer
from omnibal_ext.modalities.modality import LANGUAGE, Size
from omnibal_ext.modalities.work import BYTES, Work, cheap_passes

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture

SCORES = 2
"""fp32 probabilities a token and expert that a router keeps: for the choice, and for the balance loss."""
CAPPED_SCORE = 56
"""Bytes that a capped score moves: read and written twice in half precision, six times in fp32 (cast, scale, two steps
of the cap, mask, softmax)."""
CHUNK = 64
"""Tokens of a chunk of linear attention."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """Work of a layer's attention or linear attention, from its norm to its residual sum; per token unless said."""

    others: int
    """Parameters outside of its matrices, in total."""
    kept: int
    """Numbers that its backward needs besides its input."""
    late: int
    """Numbers held from B to W, other than hidden states: output gradients of QKV, inputs of the output projection."""
    moved: int
    """Numbers that elementwise operations read and write, forward."""
    operations: int
    """Operations of the forward besides its matrices."""
    per_square: int = 0
    """Operations of the forward times a sample's length squared."""
    score_bytes: int = 0
    """Times a sample's length squared, see `Work`."""
    exchanged: int = 0
    """Numbers sent to other ranks of a team and back, for a token of a cut sample."""
    exchanged_keys: int = 0
    """Part of `exchanged`: keys and values."""
    key_groups: int = 0
    states: float = 0.0
    """Forward operations of linear attention as a recurrence: read the state by key, update it, read it by query."""


def attention(mixer: Attention, t: int) -> Mixer:
    """Return the work of softmax attention, its heads padded to divide over `t` tensor-parallel ranks."""
    groups = mixer.groups_over(t)
    heads = groups * (mixer.heads // mixer.kv_heads) * mixer.head_dim
    gates, projected = heads * mixer.output_gate, 0
    if not mixer.reads_keys:
        projected = (1 if mixer.keys_are_values else 2) * groups * mixer.head_dim
    copies = t * mixer.groups_on(t)  # each rank that shares a group has a copy
    key_value = 2 * copies * mixer.head_dim
    own = 0 if mixer.reads_keys else key_value
    rotated = heads + key_value // 2
    normalised = (heads + own // 2) * mixer.qk_norm + own // 2 * mixer.value_norm
    repeated = (2 * heads - key_value) * mixer.is_masked  # with a mask keys and values are repeated for every head
    return Mixer(
        others=(2 - mixer.reads_keys) * mixer.head_dim * mixer.qk_norm,
        # Rotated query and key, value, output; inputs of norms; gates, and the outputs they multiply.
        kept=2 * heads + (key_value + own) // 2 + repeated + normalised + 2 * gates,
        late=2 * heads + projected + gates,
        moved=2 * heads + projected + 2 * rotated + 2 * normalised + 3 * gates,
        operations=0,
        per_square=2 * heads,
        score_bytes=heads // mixer.head_dim * CAPPED_SCORE if mixer.score_cap else 0,
        exchanged=2 * heads + key_value,
        exchanged_keys=key_value,
        key_groups=copies,
    )


def linear_attention(linear: LinearAttention, t: int) -> Mixer:
    """Return the work of Gated DeltaNet by flash-linear-attention's kernels, its groups padded for `t` tensor ranks.

    Operations in a chunk: K K^T, Q K^T, the triangular system and products with its solution. On the state: reads by
    keys and queries, and the update.
    """
    groups = linear.groups_over(t)
    heads, convolved, projected = (groups * one for one in (linear.heads_a_group, linear.convolved, linear.projected))
    key, value = linear.key_width, linear.value_width
    values, repeated = heads * value, 2 * heads * key  # query and key repeated for each value head
    return Mixer(
        others=convolved * linear.kernel + 2 * heads + value,
        # Convolution's input; query, key, value; solution of a chunk's system; rates; output, gates, gated output.
        kept=convolved + repeated + values + CHUNK * heads + 4 * heads + 3 * values,
        late=projected + values,
        moved=2 * projected + 2 * convolved + 2 * repeated + 2 * values + 3 * values,
        operations=heads * (2 * CHUNK * (3 * key + 2 * value) + 6 * key * value),
        states=6.0 * groups * linear.state,
        exchanged=projected + values,
    )


def works(model: "Architecture", units: Mapping[Size, int], t: int, e: int) -> dict[str, Work]:
    """Return the work of one layer of each kind, by cost key, on a pack of `units`, as `costs.works.layer_works`."""
    language, tokens = model.language, units[LANGUAGE.size]
    g, words = language.hidden_size, language.vocab_size * language.hidden_size
    encoded = sum(one.tokens(units[one.modality.size]) * one.features.streams for one in model.encoders)
    layers = model.kinds_apart("llm").items()
    return {
        "word_embed": Work(words, 0, tokens, g, (tokens * 8 + encoded * g * BYTES) * t),
        **{name: language_work(language, one, tokens, t, e) for name, one in layers if isinstance(one, Layer)},
        # Every rank has the hidden states of all supervised tokens.
        "head": Work(
            words + g, words, tokens, g, tokens * (g + g * t + language.vocab_size) * BYTES,
            tokens * (g * t + language.vocab_size) * BYTES,
        ),
    }  # fmt: skip


def language_work(language: LanguageArchitecture, layer: Layer, tokens: int, t: int, e: int = 1) -> Work:
    """Return the work of one language layer on `tokens` tokens; `t` and `e` as in `costs.works.layer_works`."""
    mixer = linear_attention(layer.mixer, t) if isinstance(layer.mixer, LinearAttention) else attention(layer.mixer, t)
    matrices = language_layer(language, layer, t)
    g, experts = language.hidden_size, layer.experts or Experts(1, 1)
    routed, shares = layer.experts is not None, experts.shared > 0
    gated = shares and experts.shared_gate
    beside = experts.beside > 0
    inner = experts.chosen * 3 * layer.ffn_hidden_size + 3 * (experts.shared + experts.beside)
    sorted_tokens = experts.chosen * g * routed  # one copy per chosen expert
    distributed = e > 1
    copies = sorted_tokens * (1 if distributed else t)  # of all ranks together
    # Two norms and two residuals; a shared expert's gate and sum; copies sorted by expert, on the receiving rank again.
    sorting = (8 if distributed else 4) * sorted_tokens / g
    passes = 10 + inner / g + 4 * layer.branch_norms + 3 * shares + 2 * gated + sorting
    passes += 16 * beside  # three more norms, the router's norm and scale, the sum
    # Inputs of norms, mixer and MLP; of branch norms; a gated shared expert's output; with a dense MLP next to experts
    # inputs of the norms after both, and of the router's scale and matrix.
    kept = (
        (4 + 4 * beside) * g
        + inner
        + 2 * g * layer.branch_norms
        + g * gated
        + copies
        + 2 * SCORES * experts.count * routed
    )
    late = inner + (2 * copies + 2 * g * t * (1 + shares + beside) if routed else 4 * g * t)
    # With experts only the first norm is recomputed: router, copies and experts keep the second one's output.
    cheap, reruns = (g, 2.0) if routed else (2 * g + layer.ffn_hidden_size, cheap_passes(g, inner))
    parameters = sum(matrix.weights for matrix in matrices) + mixer.others
    inputs, table = (own.width, own.width * own.words) if (own := layer.layer_inputs) else (0, 0)
    if inputs:  # core's linear layers, which gather inputs again in W; the first hidden states are held elsewhere
        parameters += table + g
        kept, late, passes = kept + 2 * g + 4 * inputs, late + g + g * t + 3 * inputs, passes + 5 + 6 * inputs / g
    return Work(
        parameters=parameters + 2 * g * (1 + layer.branch_norms) + (4 * g + experts.count) * beside,
        matrix_weights=sum(matrix.multiplied for matrix in matrices),
        tokens=tokens,
        width=g,
        kept=tokens * (kept + mixer.kept) * BYTES,
        late=tokens * (late + mixer.late) * BYTES,
        attention=tokens * mixer.operations + mixer.per_square * tokens**2,
        per_square=mixer.per_square,
        score_bytes=mixer.score_bytes,
        states=mixer.states,
        exchanged=mixer.exchanged,
        exchanged_keys=mixer.exchanged_keys,
        key_groups=mixer.key_groups,
        passes=passes + mixer.moved / g,
        blocks=2 + shares + beside + 1.5 * (inputs > 0),
        cheap=tokens * cheap * BYTES,
        cheap_passes=reruns,
        routed=sorted_tokens,
        expert_parameters=sum(matrix.weights for matrix in matrices if matrix.experts),
        for_weights=tokens * (copies + experts.chosen * layer.ffn_hidden_size) * routed * BYTES,
    )
