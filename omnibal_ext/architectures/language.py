"""A language model as plain data: the sizes that the planner prices, and what the trainer builds from them."""

from dataclasses import dataclass, field, replace
from math import log

from omnibal_ext.architectures.fields import LATER, filled_up
from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.chain import DENSE, FAR, FAR_TAKING, TAKING


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

    @property
    def own_values(self) -> bool:
        """Values have a matrix of their own."""
        return not self.keys_are_values


@dataclass(frozen=True)
class Experts:
    """Perceptrons in the place of one, some of which each token goes through: a router chooses.

    They are alike in all layers that have them.
    """

    count: int
    chosen: int
    """Those that a token goes through: the likeliest."""
    renormalised: bool = True
    """What a token's experts weigh adds up to 1; else they weigh as likely as they are among all."""
    balance: float = 0.001
    """What the routers' balance loss weighs in training."""
    beside: int = field(default=0, metadata=LATER)
    """Width of a perceptron beside the experts, through which every token goes too: both have norms of their own in
    front and behind, and the router one without a weight (Gemma 4); 0: there is none."""
    shared: int = 0
    """Width of one more perceptron, through which every token goes; 0: there is none."""
    shared_gate: bool = field(default=True, metadata=LATER)
    """That one's output is multiplied with a gate of its own."""
    sigmoids: bool = field(default=False, metadata=LATER)
    """How likely an expert is says a sigmoid for each; by that and a bias of its own, which is not trained, the router
    chooses (arXiv 2408.15664). Else a softmax over all."""
    groups: int = field(default=1, metadata=LATER)
    """Groups of experts; a token's are those of the likeliest groups, by their two likeliest experts."""
    chosen_groups: int = field(default=1, metadata=LATER)
    scale: float = field(default=1.0, metadata=LATER)
    """What a token's experts weigh is multiplied with."""
    dense_layers: int = field(default=0, metadata=LATER)
    """Layers in front that have one perceptron in the place of experts."""
    dense_width: int = field(default=0, metadata=LATER)
    """Its width."""


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
    keys_are_values: bool = field(default=False, metadata=LATER)
    """Before their norms; of one layer (`of_layer`)."""
    layer_scalar: bool = field(default=False, metadata=LATER)
    """What a layer gives is multiplied with one number, which is not trained."""
    score_cap: float | None = field(default=None, metadata=LATER)
    """Scores x become cap tanh(x / cap), before masks."""
    logit_cap: float | None = field(default=None, metadata=LATER)
    """Logits x become cap tanh(x / cap)."""
    layer_inputs: LayerInputs | None = field(default=None, metadata=LATER)
    shared_keys: SharedKeys | None = field(default=None, metadata=LATER)
    takes_keys: bool = field(default=False, metadata=LATER)
    """Keys and values are an earlier layer's; of one layer (`of_layer`)."""
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

    @property
    def far_layers(self) -> tuple[int, ...]:
        """Layers whose heads are others than most; none in most models."""
        near = self.sliding.layers if self.sliding else ()
        return tuple(number for number in range(self.layers) if number not in near) if self.far else ()

    def of_layer(self, number: int) -> "LanguageArchitecture":
        """The same with the heads and the perceptron, or experts, that layer `number` has."""
        one = self.with_far_heads if number in self.far_layers else self
        one = one.without_keys if number in self.taking_layers else one
        return one.without_experts if number in self.dense_layers else one

    @property
    def without_keys(self) -> "LanguageArchitecture":
        """As layers have it that take keys and values of others."""
        if self.shared_keys is None:
            return self
        return replace(self, takes_keys=True, ffn_hidden_size=self.ffn_hidden_size * (1 + self.shared_keys.widens))

    @property
    def by_kind(self) -> dict[str, "LanguageArchitecture"]:
        """By the name that costs and weights of layers with softmax attention stand under, the same as they have it."""
        found = {"llm": self} | ({FAR: self.with_far_heads} if self.far else {})
        if self.shared_keys:
            found |= {TAKING: self.without_keys, FAR_TAKING: self.with_far_heads.without_keys}
        return found | ({DENSE: self.without_experts} if self.dense_layers else {})

    @property
    def taking_layers(self) -> tuple[int, ...]:
        """Layers that take keys and values of others; none in most models."""
        first = self.layers - (self.shared_keys.layers if self.shared_keys else 0)
        return tuple(range(first, self.layers))

    def keys_of(self, number: int) -> int:
        """The layer whose keys and values layer `number` reads; itself in most models."""
        if number not in self.taking_layers:
            return number
        near = self.sliding.layers if self.sliding else ()
        alike = [one for one in range(self.taking_layers[0]) if (one in near) == (number in near)]
        return alike[-1]

    @property
    def giving_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values others take."""
        return tuple(sorted({self.keys_of(number) for number in self.taking_layers}))

    @property
    def without_experts(self) -> "LanguageArchitecture":
        """As layers in front of those with experts have it."""
        return replace(self, ffn_hidden_size=self.experts.dense_width, experts=None) if self.experts else self

    @property
    def with_far_heads(self) -> "LanguageArchitecture":
        """As layers have it that slide no window."""
        if self.far is None:
            return self
        near_alone = self.sliding is not None and self.sliding.images_here_alone
        return replace(
            self,
            kv_heads=self.far.kv_heads,
            head_size=self.far.head_size,
            keys_are_values=self.far.keys_are_values,
            image_attention=self.image_attention and not near_alone,
        )

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Layers of linear attention; none in most models."""
        return self.linear.layers if self.linear else ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with one perceptron in front of those with experts; none where all are alike."""
        return tuple(range(self.experts.dense_layers)) if self.experts else ()

    def groups_over(self, ranks: int) -> int:
        """Groups of heads that share key and value, on tensor-parallel ranks: the model's, where `ranks` divides the
        heads and divides or shares the groups, else the next number that it divides; what is more are zeros."""
        if self.heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0):
            return self.kv_heads
        return filled_up(self.kv_heads, ranks)

    def groups_on(self, ranks: int) -> int:
        """Of these groups those that one of the ranks has; where several share one, each has a copy."""
        return max(1, self.groups_over(ranks) // ranks)
