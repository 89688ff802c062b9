"""A language model as plain data: the sizes that the planner prices, and what the trainer builds from them."""

from dataclasses import dataclass, field
from functools import cached_property
from math import log

from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.fields import LATER
from omnibal_ext.architectures.layer import Attention, Layer
from omnibal_ext.architectures.linear_attention import LinearAttention


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotation for longer texts.

    "linear" divides every angle, "llama3" and "yarn" those of long waves, "yarn" (arXiv 2309.00071) with sharper
    attention; "dynamic" stretches the waves of samples longer than the original context, by their length;
    "proportional" lets only the first pairs of a head turn, and divides their angles.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    """Waves that fit into the original context so many times or less are slowed by the whole factor."""
    high_frequency_factor: float = 4.0
    """Waves that fit into it so many times or more are not slowed."""
    original_positions: int = 8192
    whole_dimensions: bool = True
    """The border of yarn's waves is rounded to whole frequencies."""
    turning: float = field(default=1.0, metadata=LATER)
    """Share of a head's pairs that turn at all ("proportional")."""

    @property
    def attention_factor(self) -> float:
        """What yarn multiplies rotated queries and keys with; 1 elsewhere."""
        return 0.1 * log(self.factor) + 1 if self.kind == "yarn" and self.factor > 1 else 1.0


@dataclass(frozen=True)
class SlidingWindow:
    """Language layers in which a token looks back over a few tokens only, and turns by a base of their own."""

    tokens: int
    """How many a token sees, itself among them."""
    layers: tuple[int, ...]
    theta: float
    """Base of these layers' rotation, which is not scaled."""
    images_here_alone: bool = field(default=False, metadata=LATER)
    """Where tokens of an image see each other, they do so in these layers and in no others (Gemma 4)."""
    images_whole: bool = field(default=False, metadata=LATER)
    """They see all of it, however far back it begins (Gemma 4 without towers); else none that the window leaves out."""


@dataclass(frozen=True)
class FarHeads:
    """Heads of the layers that slide no window, where they are others than those of the layers that do (Gemma 4)."""

    kv_heads: int
    head_size: int
    keys_are_values: bool
    """One matrix gives both, which are normalised apart."""


@dataclass(frozen=True)
class LayerInputs:
    """What every layer reads beside its hidden states: of each word a row of a table of its own, and what a matrix of
    its own makes of the first hidden states (Gemma 4 E2B)."""

    width: int
    words: int
    """Rows of a table."""
    blank: int
    """The word in the place of image tokens there; no table learns its row."""


@dataclass(frozen=True)
class SharedKeys:
    """The last layers take keys and values of the last layer in front of all of them that slides a window, or slides
    none, as they do (Gemma 4 E2B)."""

    layers: int
    """How many take them."""
    widens: bool
    """Their perceptrons are twice as wide."""


@dataclass(frozen=True)
class LanguageArchitecture:
    """A decoder-only language model: RMSNorm, a gated perceptron, rotary positions, grouped-query attention."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of every head's query and key by itself (Qwen3)."""
    head_size: int | None = None
    """Width of one head where it is not hidden_size / heads."""
    rope_scaling: RopeScaling | None = None
    rotary_sections: tuple[int, ...] = ()
    """Frequencies that turn with time, row and column of a token (M-RoPE); all with its place where there are none."""
    rotary_interleaved: bool = False
    """Neighbouring frequencies turn with different ones of the three, as long as each has some left (Qwen3-VL)."""
    max_positions: int | None = None
    """Longer samples are refused: beyond, the model slides a window in all of its layers, which we do not."""
    activation: str = "silu"  # or "gelu_tanh"
    centred_norms: bool = False
    """Norms multiply with 1 + weight (Gemma)."""
    branch_norms: bool = False
    """Attention and perceptron end in a norm, before the residual connection."""
    scaled_words: bool = False
    """Word embeddings are multiplied with the root of hidden_size, rounded as the weights are."""
    query_scale: int | None = None
    """Scores are divided by the root of this; None: of a head's width."""
    sliding: SlidingWindow | None = None
    far: FarHeads | None = field(default=None, metadata=LATER)
    value_norm: bool = field(default=False, metadata=LATER)
    """RMSNorm of every head's value by itself, without a weight."""
    layer_scalar: bool = field(default=False, metadata=LATER)
    """What a layer gives is multiplied with one number, which is not trained."""
    score_cap: float | None = field(default=None, metadata=LATER)
    """Scores x become cap tanh(x / cap), before masks."""
    logit_cap: float | None = field(default=None, metadata=LATER)
    """Logits x become cap tanh(x / cap)."""
    layer_inputs: LayerInputs | None = field(default=None, metadata=LATER)
    shared_keys: SharedKeys | None = field(default=None, metadata=LATER)
    image_attention: bool = False
    """Tokens of an image see those of the same image behind them too."""
    prefix_attention: bool = field(default=False, metadata=LATER)
    """So do all tokens before a sample's answer, whatever window there is (PaliGemma)."""
    experts: Experts | None = None
    """Layers have so many perceptrons of width `ffn_hidden_size`, and a router."""
    linear: LinearAttention | None = None
    """Layers of another kind among those of attention."""
    output_gate: bool = False
    """What attention gives is multiplied with a gate for each number, projected beside the query (arXiv 2505.06708)."""
    rotated: int | None = None
    """Numbers of a head that turn, the first ones; None: all."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that turn."""
        return self.rotated or self.head_dim

    @property
    def both_ways(self) -> bool:
        """Tokens see some that stand behind them: samples have masks."""
        return self.image_attention or self.prefix_attention

    @property
    def dense(self) -> bool:
        """No layer has experts."""
        return self.experts is None

    @cached_property
    def each_layer(self) -> tuple[Layer, ...]:
        """The layers, one by one."""
        return tuple(self._layer(number) for number in range(self.layers))

    def _layer(self, number: int) -> Layer:
        window = self.sliding.tokens if self.sliding and number in self.sliding.layers else None
        keys_from, experts, inner = self._keys_from(number), self.experts, self.ffn_hidden_size
        if keys_from is not None and self.shared_keys and self.shared_keys.widens:
            inner *= 2
        if experts and number < experts.dense_layers:
            inner, experts = experts.dense_width, None
        if self.linear and number in self.linear.layers:
            return Layer(self.linear, inner, experts)
        heads, width, one_matrix = self.kv_heads, self.head_dim, False
        if self.far and window is None:
            heads, width, one_matrix = self.far.kv_heads, self.far.head_size, self.far.keys_are_values
        sees_images = self.image_attention
        if self.sliding and self.sliding.images_here_alone and window is None:
            sees_images = False
        mixer = Attention(
            self.heads, heads, width, one_matrix, keys_from is not None, sees_images, self.prefix_attention, window
        )
        return Layer(mixer, inner, experts, keys_from)

    def _keys_from(self, number: int) -> int | None:
        """The last of the layers with keys of their own that slides a window, or none, as layer `number` does."""
        first = self.layers - (self.shared_keys.layers if self.shared_keys else 0)
        if number < first:
            return None
        near = self.sliding.layers if self.sliding else ()
        return max(other for other in range(first) if (other in near) == (number in near))
