"""A language model as fields that hold for all layers, of which layers are derived: what readers said until now."""

from dataclasses import dataclass, field
from functools import cached_property

from omnibal_ext.modalities.fields import LATER
from omnibal_ext.modalities.language import experts, linear_attention
from omnibal_ext.modalities.language.layer import Attention, Layer, LayerInputs
from omnibal_ext.modalities.language.rope import Rope, RopeScaling


@dataclass(frozen=True)
class LinearAttention(linear_attention.LinearAttention):
    """Linear attention of the layers with these numbers."""

    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Experts(experts.Experts):
    """Experts behind so many dense layers of a width of their own."""

    dense_layers: int = field(default=0, metadata=LATER)
    dense_width: int = field(default=0, metadata=LATER)


@dataclass(frozen=True)
class SlidingWindow:
    """Language layers with a sliding window, and their own RoPE base."""

    tokens: int
    """Width of the window, the current token included."""
    layers: tuple[int, ...]
    theta: float
    """RoPE base of these layers, without scaling."""
    images_here_alone: bool = field(default=False, metadata=LATER)
    """Attention among an image's tokens is bidirectional in these layers only (Gemma 4)."""
    images_whole: bool = field(default=False, metadata=LATER)
    """That attention covers the entire image, beyond the window too (Gemma 4 without towers)."""


@dataclass(frozen=True)
class FarHeads:
    """Heads of the layers without a sliding window, if different from the others' (Gemma 4)."""

    kv_heads: int
    head_size: int
    keys_are_values: bool
    """Keys and values are the same projection, with different norms."""


@dataclass(frozen=True)
class SharedKeys:
    """The last layers use keys and values of an earlier layer, the last one before all of them of their own type, with
    or without sliding window (Gemma 4 E2B)."""

    layers: int
    """Number of these layers."""
    widens: bool
    """Their MLPs are twice as wide."""


@dataclass(frozen=True)
class LanguageArchitecture:
    """A decoder-only language model: RMSNorm, gated MLP, rotary positions, grouped-query attention."""

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
    """RMSNorm of query and key per head (Qwen3)."""
    head_size: int | None = None
    """Width of one head; None: hidden_size / heads."""
    rope_scaling: RopeScaling | None = None
    rotary_sections: tuple[int, ...] = ()
    """Numbers of frequencies for time, row and column (M-RoPE); (): all for the position in the sequence."""
    rotary_interleaved: bool = False
    """The three sections are interleaved instead of consecutive (Qwen3-VL)."""
    max_positions: int | None = None
    """Longer samples are refused: the model has a sliding window of this size in all layers, unsupported here."""
    activation: str = "silu"  # or "gelu_tanh"
    centred_norms: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    branch_norms: bool = False
    """A norm after attention and after the MLP, before the residual connection."""
    scaled_words: bool = False
    """Word embeddings are multiplied by sqrt(hidden_size), rounded to the weights' precision."""
    query_scale: int | None = None
    """Scores are divided by the square root of this; None: of the head's width."""
    sliding: SlidingWindow | None = None
    far: FarHeads | None = field(default=None, metadata=LATER)
    value_norm: bool = field(default=False, metadata=LATER)
    """RMSNorm of the value per head, without weight."""
    layer_scalar: bool = field(default=False, metadata=LATER)
    """A layer's output is multiplied by a scalar, which is not trained."""
    score_cap: float | None = field(default=None, metadata=LATER)
    """Scores x become cap tanh(x / cap), before masks."""
    logit_cap: float | None = field(default=None, metadata=LATER)
    """Logits x become cap tanh(x / cap)."""
    layer_inputs: LayerInputs | None = field(default=None, metadata=LATER)
    shared_keys: SharedKeys | None = field(default=None, metadata=LATER)
    image_attention: bool = False
    """Attention among the tokens of an image is bidirectional."""
    prefix_attention: bool = field(default=False, metadata=LATER)
    """Attention among the tokens before a sample's answer is bidirectional, in any window (PaliGemma)."""
    experts: Experts | None = None
    """Mixture of experts of width `ffn_hidden_size`; None: dense."""
    linear: LinearAttention | None = None
    """Layers with linear attention among the others; None: there are none."""
    output_gate: bool = False
    """Attention's output is multiplied elementwise by a gate, projected with the query (arXiv 2505.06708)."""
    rotated: int | None = None
    """Rotary width of a head: its first so many numbers; None: all."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden_size // self.heads

    @cached_property
    def each_layer(self) -> tuple[Layer, ...]:
        """The layers, one by one."""
        return tuple(self._layer(number) for number in range(self.layers))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Softmax attention of each layer that has it."""
        return tuple(layer.attention for layer in self.each_layer if layer.attention)

    def _layer(self, number: int) -> Layer:
        window = self.sliding.tokens if self.sliding and number in self.sliding.layers else None
        keys_from, experts, inner = self._keys_from(number), self.experts, self.ffn_hidden_size
        if keys_from is not None and self.shared_keys and self.shared_keys.widens:
            inner *= 2
        if experts and number < experts.dense_layers:
            inner, experts = experts.dense_width, None
        more = (self.activation, self.branch_norms, self.layer_scalar, self.layer_inputs)
        if self.linear and number in self.linear.layers:
            return Layer(self.linear, inner, experts, *more)
        heads, width, one_matrix = self.kv_heads, self.head_dim, False
        if self.far and window is None:
            heads, width, one_matrix = self.far.kv_heads, self.far.head_size, self.far.keys_are_values
        sees_images = self.image_attention
        if self.sliding and self.sliding.images_here_alone and window is None:
            sees_images = False
        theta, scaling = self.rope_theta, self.rope_scaling
        if self.sliding and window is not None:
            theta, scaling = self.sliding.theta, None
        mixer = Attention(
            self.heads,
            heads,
            width,
            rope=Rope(theta, scaling, self.rotary_sections, self.rotary_interleaved, self.rotated),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            value_norm=self.value_norm,
            query_scale=self.query_scale,
            score_cap=self.score_cap,
            output_gate=self.output_gate,
            keys_are_values=one_matrix,
            reads_keys=keys_from is not None,
            sees_images=sees_images,
            images_whole=self.sliding is not None and self.sliding.images_whole,
            sees_prefix=self.prefix_attention,
            window=window,
        )
        return Layer(mixer, inner, experts, *more, keys_from=keys_from)

    def _keys_from(self, number: int) -> int | None:
        """Return the layer whose keys and values layer `number` uses (`SharedKeys`); None: its own."""
        first = self.layers - (self.shared_keys.layers if self.shared_keys else 0)
        if number < first:
            return None
        near = self.sliding.layers if self.sliding else ()
        return max(other for other in range(first) if (other in near) == (number in near))
