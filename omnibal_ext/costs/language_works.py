"""What a language model's layers ask for: attention or linear attention, and perceptrons or experts behind it."""

from dataclasses import dataclass

from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.layer import Attention, Layer
from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.costs.work import BYTES, Work, cheap_passes
from omnibal_ext.matrices import language_layer

SCORES = 2
"""fp32 numbers a token and expert that a router's backward needs: how likely it is for the choice, and for the balance.
"""
CAPPED_SCORE = 56
"""Bytes read and written of a capped score: twice each in half precision; six times each in fp32, which it becomes, is
scaled, capped in two steps, masked, and made a share in."""
CHUNK = 64
"""Tokens whose influence on each other linear attention computes at once."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """What mixes the tokens of a layer, between its norm and its residual connection, a token unless said."""

    others: int
    """Parameters beside its matrices."""
    kept: int
    """Numbers that its backward needs beside its input."""
    late: int
    """Numbers from B to W beside those of the layer's width: outputs' gradients into it, inputs out of it."""
    moved: int
    """Numbers that elementwise operations read and write, forward."""
    operations: int
    """Beside those of its matrices, forward."""
    per_square: int = 0
    """The same for each token squared of a sample's length."""
    score_bytes: int = 0
    """Of scores, for each token squared of a sample's length: see `Work`."""
    exchanged: int = 0
    """Numbers that go to the ranks that compute a head, of samples that several hold, and come back."""
    exchanged_keys: int = 0
    """Of these keys and values."""
    key_groups: int = 0
    states: float = 0.0
    """Operations forward, token by token: what a key finds in every state, what it adds, what a query finds."""


def attention(language: LanguageArchitecture, mixer: Attention, t: int) -> Mixer:
    """Softmax attention, with heads filled up for `t` tensor-parallel ranks."""
    groups = mixer.groups_over(t)
    heads = groups * (mixer.heads // mixer.kv_heads) * mixer.head_dim
    gates, projected = heads * language.output_gate, 0
    if not mixer.reads_keys:
        projected = (1 if mixer.keys_are_values else 2) * groups * mixer.head_dim
    copies = t * mixer.groups_on(t)  # ranks that share a group have one each
    key_value = 2 * copies * mixer.head_dim
    own = 0 if mixer.reads_keys else key_value
    rotated = heads + key_value // 2
    normalised = (heads + own // 2) * language.qk_norm + own // 2 * language.value_norm
    repeated = (2 * heads - key_value) * mixer.is_masked  # under a mask every head has its key and value
    return Mixer(
        others=(2 - mixer.reads_keys) * mixer.head_dim * language.qk_norm,
        # Query, turned key, value and output; before their norm query and key; gates, and what they are applied to.
        kept=2 * heads + (key_value + own) // 2 + repeated + normalised + 2 * gates,
        late=2 * heads + projected + gates,
        moved=2 * heads + projected + 2 * rotated + 2 * normalised + 3 * gates,
        operations=0,
        per_square=2 * heads,
        score_bytes=heads // mixer.head_dim * CAPPED_SCORE if language.score_cap else 0,
        exchanged=2 * heads + key_value,
        exchanged_keys=key_value,
        key_groups=copies,
    )


def linear_attention(linear: LinearAttention, t: int) -> Mixer:
    """Gated DeltaNet, with groups filled up for `t` tensor-parallel ranks, by flash-linear-attention's kernels.

    Of a chunk's tokens the products of keys and of queries with keys, the system that is solved and what is read of its
    solution; of the state what is read for keys and queries, and what is added.
    """
    groups = linear.groups_over(t)
    heads, convolved, projected = (groups * one for one in (linear.heads_a_group, linear.convolved, linear.projected))
    key, value = linear.key_width, linear.value_width
    values, repeated = heads * value, 2 * heads * key  # query and key once for each head of values
    return Mixer(
        others=convolved * linear.kernel + 2 * heads + value,
        # Before the convolution; query, key, value; a chunk's solved system; rates; output, gates, and both together.
        kept=convolved + repeated + values + CHUNK * heads + 4 * heads + 3 * values,
        late=projected + values,
        moved=2 * projected + 2 * convolved + 2 * repeated + 2 * values + 3 * values,
        operations=heads * (2 * CHUNK * (3 * key + 2 * value) + 6 * key * value),
        states=6.0 * groups * linear.state,
        exchanged=projected + values,
    )


def language_work(language: LanguageArchitecture, layer: Layer, tokens: int, t: int, e: int = 1) -> Work:
    """Of one layer, as `works.layer_works` has them."""
    if isinstance(layer.mixer, LinearAttention):
        mixer = linear_attention(layer.mixer, t)
    else:
        mixer = attention(language, layer.mixer, t)
    matrices = language_layer(language, layer, t)
    g, experts = language.hidden_size, layer.experts or Experts(1, 1)
    routed, shares = layer.experts is not None, experts.shared > 0
    gated = shares and experts.shared_gate
    beside = experts.beside > 0
    inner = experts.chosen * 3 * layer.ffn_hidden_size + 3 * (experts.shared + experts.beside)
    sorted_tokens = experts.chosen * g * routed  # a copy for each of a token's experts
    dealt = e > 1
    copies = sorted_tokens * (1 if dealt else t)  # of all ranks; dealt ones are sorted again where they have come
    # Two norms and two residual connections; of what an expert that all tokens share gives the gate, and the sum.
    passes = (
        10 + inner / g + 4 * language.branch_norms + 3 * shares + 2 * gated + (8 if dealt else 4) * sorted_tokens / g
    )
    passes += 16 * beside  # three norms more, the router's and its scale, the sum
    # Inputs of both norms, of the mixer and of the perceptron; branches before their norms; a gated expert's output; of
    # a perceptron beside experts and of these what goes into the norms behind, and what a router scales and multiplies.
    kept = (
        (4 + 4 * beside) * g
        + inner
        + 2 * g * language.branch_norms
        + g * gated
        + copies
        + 2 * SCORES * experts.count * routed
    )
    late = inner + (2 * copies + 2 * g * t * (1 + shares + beside) if routed else 4 * g * t)
    # Routers and sorted copies keep what the norm in front of experts gives, and so does each expert.
    cheap, again = (g, 2.0) if routed else (2 * g + layer.ffn_hidden_size, cheap_passes(g, inner))
    parameters = sum(matrix.weights for matrix in matrices) + mixer.others
    inputs, table = (own.width, own.width * own.words) if (own := language.layer_inputs) else (0, 0)
    if inputs:  # of core's linear layers, which gather inputs again in W; the first hidden states are held elsewhere
        parameters += table + g
        kept, late, passes = kept + 2 * g + 4 * inputs, late + g + g * t + 3 * inputs, passes + 5 + 6 * inputs / g
    return Work(
        parameters=parameters + 2 * g * (1 + language.branch_norms) + (4 * g + experts.count) * beside,
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
        cheap_passes=again,
        routed=sorted_tokens,
        expert_parameters=sum(matrix.weights for matrix in matrices if matrix.experts),
        for_weights=tokens * (copies + experts.chosen * layer.ffn_hidden_size) * routed * BYTES,
    )
