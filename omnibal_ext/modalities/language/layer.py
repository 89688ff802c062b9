"""One layer of a language model as a value: attention and feed-forward. Equal layers share a cost.

Properties that all layers share (norms, biases, activation) are in `LanguageArchitecture`.
"""

from dataclasses import dataclass, field

from omnibal_ext.modalities.fields import filled_up
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.linear_attention import LinearAttention


@dataclass(frozen=True)
class Attention:
    """Softmax grouped-query attention.

    A window does not change a layer's cost: all scores are computed, and masked.
    """

    heads: int
    kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    """Keys and values are the same projection, with different norms."""
    reads_keys: bool = False
    """Keys and values are those of an earlier layer (`Layer.keys_from`); no projection of its own."""
    sees_images: bool = False
    """Bidirectional among the tokens of an image."""
    sees_prefix: bool = False
    """Bidirectional among the tokens before a sample's answer."""
    window: int | None = field(default=None, compare=False)
    """Sliding window in tokens, the current one included; None: all earlier tokens."""

    @property
    def is_masked(self) -> bool:
        """Some tokens attend to later ones, so samples need masks."""
        return self.sees_images or self.sees_prefix

    def groups_over(self, ranks: int) -> int:
        """Return the key-value heads over `ranks` tensor-parallel ranks: padded with zeros to a multiple of `ranks`,
        unless `ranks` divides the query heads, and divides or is a multiple of the key-value heads."""
        if self.heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0):
            return self.kv_heads
        return filled_up(self.kv_heads, ranks)

    def groups_on(self, ranks: int) -> int:
        """Return the key-value heads of one rank; ranks that share one have a copy each."""
        return max(1, self.groups_over(ranks) // ranks)


@dataclass(frozen=True)
class Layer:
    """A language layer: attention or linear attention (`mixer`), then a gated MLP or experts."""

    mixer: Attention | LinearAttention
    ffn_hidden_size: int
    """Inner width of the MLP, or of each expert."""
    experts: Experts | None = None
    keys_from: int | None = field(default=None, compare=False)
    """Number of the layer whose keys and values it uses; None: its own."""

    @property
    def attention(self) -> Attention | None:
        """The mixer, if it is softmax attention."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def linear(self) -> LinearAttention | None:
        """The mixer, if it is linear attention."""
        return self.mixer if isinstance(self.mixer, LinearAttention) else None
