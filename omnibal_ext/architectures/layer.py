"""One layer of a language model as a value: what mixes its tokens, and its feed-forward. Equal layers share a cost.

What all layers of a model have in common (norms, biases, activation) is said once, in `LanguageArchitecture`.
"""

from dataclasses import dataclass, field

from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.fields import filled_up
from omnibal_ext.architectures.linear_attention import LinearAttention


@dataclass(frozen=True)
class Attention:
    """Softmax attention: groups of query heads, each of which shares one key and one value head.

    A window does not change what a layer costs: scores are computed whole, and masked.
    """

    heads: int
    kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    """One matrix gives both, before their norms."""
    reads_keys: bool = False
    """Keys and values are those of an earlier layer (`Layer.keys_from`): it has no matrix for them."""
    sees_images: bool = False
    """Tokens of an image see those of the same image behind them too."""
    sees_prefix: bool = False
    """Tokens before a sample's answer see each other."""
    window: int | None = field(default=None, compare=False)
    """Tokens that a token looks back over, itself among them; None: all."""

    @property
    def is_masked(self) -> bool:
        """Tokens see some that stand behind them: samples have masks."""
        return self.sees_images or self.sees_prefix

    def groups_over(self, ranks: int) -> int:
        """Groups of heads on tensor-parallel ranks: the model's, where `ranks` divides the heads and divides or shares
        the groups, else the next number that it divides; what is more are zeros."""
        if self.heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0):
            return self.kv_heads
        return filled_up(self.kv_heads, ranks)

    def groups_on(self, ranks: int) -> int:
        """Of these groups those that one of the ranks has; where several share one, each has a copy."""
        return max(1, self.groups_over(ranks) // ranks)


@dataclass(frozen=True)
class Layer:
    """A language layer: a mixer of tokens, then a gated perceptron or experts."""

    mixer: Attention | LinearAttention
    ffn_hidden_size: int
    """Inner width of the perceptron, or of each expert."""
    experts: Experts | None = None
    keys_from: int | None = field(default=None, compare=False)
    """The layer whose keys and values it reads; None: its own."""

    @property
    def attention(self) -> Attention | None:
        """The mixer, if it is softmax attention."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def linear(self) -> LinearAttention | None:
        """The mixer, if it is linear attention."""
        return self.mixer if isinstance(self.mixer, LinearAttention) else None
