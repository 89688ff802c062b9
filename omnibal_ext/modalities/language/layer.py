"""One layer of a language model as a value: attention and feed-forward. Equal layers share a cost."""

from dataclasses import dataclass, field

from omnibal_ext.modalities.fields import LATER, filled_up
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.linear_attention import LinearAttention
from omnibal_ext.modalities.language.rope import Rope


@dataclass(frozen=True)
class Attention:
    """Softmax grouped-query attention.

    Window and RoPE do not change a layer's cost: all scores are computed, and masked.
    """

    heads: int
    kv_heads: int
    head_dim: int
    """Width of one head."""
    rope: Rope = field(default=Rope(), compare=False)
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of query and key per head (Qwen3)."""
    value_norm: bool = field(default=False, metadata=LATER)
    """RMSNorm of the value per head, without weight."""
    query_scale: int | None = None
    """Scores are divided by the square root of this; None: of the head's width."""
    score_cap: float | None = field(default=None, metadata=LATER)
    """Scores x become cap tanh(x / cap), before masks."""
    output_gate: bool = False
    """The output is multiplied elementwise by a gate, projected with the query (arXiv 2505.06708)."""
    keys_are_values: bool = False
    """Keys and values are the same projection, with different norms."""
    reads_keys: bool = False
    """Keys and values are those of an earlier layer (`Layer.keys_from`); no projection of its own."""
    sees_images: bool = False
    """Bidirectional among the tokens of an image."""
    images_whole: bool = False
    """Among these beyond the window too (Gemma 4 without towers)."""
    sees_prefix: bool = False
    """Bidirectional among the tokens before a sample's answer, in any window (PaliGemma)."""
    window: int | None = field(default=None, compare=False)
    """Sliding window in tokens, the current one included; None: all earlier tokens."""

    @property
    def rotary_width(self) -> int:
        """How many numbers of a head RoPE rotates."""
        return self.rope.rotated or self.head_dim

    @property
    def is_masked(self) -> bool:
        """Whether some tokens attend to later ones: then each sample needs a mask."""
        return self.sees_images or self.sees_prefix

    def groups_over(self, ranks: int) -> int:
        """Return how many key-value heads `ranks` tensor-parallel ranks have in all: padded with zeros to a multiple of
        `ranks`, unless `ranks` divides the query heads, and divides or is a multiple of the key-value heads."""
        if self.heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0):
            return self.kv_heads
        return filled_up(self.kv_heads, ranks)

    def groups_on(self, ranks: int) -> int:
        """Return how many key-value heads one of `ranks` tensor ranks has; those that share one have a copy each."""
        return max(1, self.groups_over(ranks) // ranks)


@dataclass(frozen=True)
class LayerInputs:
    """Per-layer inputs: every layer also gets a row of its own embedding table for each token, and a projection of the
    first hidden states (Gemma 4 E2B)."""

    width: int
    words: int
    """Rows of each embedding table."""
    blank: int
    """Token id that replaces image tokens in the tables; its row is not trained."""


@dataclass(frozen=True)
class Layer:
    """A language layer: attention or linear attention (`mixer`), then a gated MLP or experts."""

    mixer: Attention | LinearAttention
    ffn_hidden_size: int
    """Inner width of the MLP, or of each expert."""
    experts: Experts | None = None
    activation: str = "silu"  # or "gelu_tanh"
    branch_norms: bool = False
    """A norm after attention and after the MLP, before the residual connection."""
    layer_scalar: bool = field(default=False, metadata=LATER)
    """The output is multiplied by a scalar, which is not trained."""
    layer_inputs: LayerInputs | None = field(default=None, metadata=LATER)
    keys_from: int | None = field(default=None, compare=False)
    """Number of the layer whose keys and values it uses; None: its own."""

    @property
    def attention(self) -> Attention | None:
        """The mixer if it is softmax attention, else None."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def linear(self) -> LinearAttention | None:
        """The mixer if it is linear attention, else None."""
        return self.mixer if isinstance(self.mixer, LinearAttention) else None
