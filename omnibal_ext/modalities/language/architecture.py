"""A language model as plain data: the sizes that the planner prices, and what the trainer builds from them."""

from dataclasses import dataclass, field
from functools import cached_property

from omnibal_ext.modalities.fields import LATER
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer, LayerInputs
from omnibal_ext.modalities.language.rope import Rope


@dataclass(frozen=True)
class Older:
    """Values that hashes of older model families have besides the layers, under the names they had then (`noted`)."""

    head_said: bool = False
    """A head's width has its name, whether or not it is hidden size / heads."""
    far_rope: Rope | None = None
    """RoPE that layers without a window would have, in a model that has none."""


@dataclass(frozen=True)
class LanguageArchitecture:
    """A decoder-only language model: a word embedding, layers one by one, an RMSNorm and a head."""

    each_layer: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    norm_epsilon: float = 1e-5
    """Epsilon of all norms."""
    centred_norms: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    scaled_words: bool = False
    """Word embeddings are multiplied by sqrt(hidden_size), rounded to the weights' precision."""
    max_positions: int | None = None
    """Longer samples are refused: the model has a sliding window of this size in all layers, unsupported here."""
    logit_cap: float | None = field(default=None, metadata=LATER)
    """Logits x become cap tanh(x / cap)."""
    older: Older | None = None
    """What hashes of families have that are older than lists of layers; None: hashes have the list."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.each_layer)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The softmax attention of each layer, in order; layers with linear attention are left out."""
        return tuple(layer.attention for layer in self.each_layer if layer.attention)

    @cached_property
    def usual(self) -> Layer:
        """The layer that stands for all: the first one with experts, in dense models the first."""
        return next((layer for layer in self.each_layer if layer.experts), self.each_layer[0])

    @property
    def takes_float8(self) -> bool:
        """Whether --fp8-format is allowed: not where any layer has linear attention or experts."""
        return not any(layer.linear or layer.experts for layer in self.each_layer)

    @property
    def experts(self) -> Experts | None:
        """The experts of all layers that have them; None: there are none."""
        return self.usual.experts

    @property
    def layer_inputs(self) -> LayerInputs | None:
        """What all layers read besides the hidden states (Gemma 4 E2B); None: nothing."""
        return self.usual.layer_inputs
