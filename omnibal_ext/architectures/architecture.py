"""A vision-language model as plain data: the sizes that the planner prices, and what the trainer builds from them."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import log
from typing import Any

from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.chain import DENSE, FAR, FULL, LINEAR, cost_kinds, features_after, layer_chain
from omnibal_ext.errors import UserError

LATER = {"later": True}
"""Of a field that models had none of at first: it changes the hash of those alone where it is not the default."""


def _filled_up(count: int, ranks: int) -> int:
    """The next number that `ranks` divides."""
    return -(-count // ranks) * ranks


@dataclass(frozen=True)
class NativeResolution:
    """How a ViT sees images at their own size: as patches with positions in two dimensions, squares of which join."""

    merge: int = 2
    """Patches a side of a square that becomes one token of the language model."""
    frames: int = 2
    """Frames of a patch; an image is a film of equal ones."""
    window: int | None = None
    """Squares a side of a window of attention; None where every layer sees whole images."""
    full_layers: tuple[int, ...] = ()
    """Layers that see whole images all the same."""
    theta: float = 1e4
    columns_between: bool = field(default=False, metadata=LATER)
    """Columns turn by the frequencies between those of rows (Pixtral); else by the same."""
    learned_positions: int | None = None
    """Learned positions a side of a square that is stretched over an image, beside the rotation; None: there are none.
    """
    axis_positions: int | None = field(default=None, metadata=LATER)
    """Learned positions of rows, and as many of columns: a patch gets one of each (Gemma 4); None: there are none."""
    by_halves: bool = field(default=False, metadata=LATER)
    """Columns turn the first half of a head and rows the second, each half by itself; else numbers of a pair are half a
    head apart, and rows turn the first pairs."""
    bicubic: bool = field(default=False, metadata=LATER)
    """They are stretched edges on edges, a patch has sixteen of them (GLM-4.1V); else corners on corners, four."""
    positions_per_second: float | None = None
    """Of a video's frames in time, for the language model; None: one a step, however far they are apart."""

    @property
    def around(self) -> int:
        """Learned positions that a patch has shares of."""
        return 0 if self.learned_positions is None else 16 if self.bicubic else 4


@dataclass(frozen=True)
class VisionArchitecture:
    """A ViT that sees square tiles of `image_size` pixels. The defaults are those of InternViT-300M.

    At native resolution a tile is a patch: what counts tiles counts patches.
    """

    layers: int
    """Those that run: a model that reads its features before the last layers has that many fewer."""
    hidden_size: int
    heads: int
    ffn_hidden_size: int
    patch_size: int = 14
    image_size: int = 448
    normalization: str = "LayerNorm"  # or "RMSNorm"
    norm_epsilon: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False  # over the full width of query and key, not per head (InternViT-6B)
    head_norms: bool = field(default=False, metadata=LATER)
    """RMSNorm of every head's query, key and, without a weight, value by itself; scores are not divided (Gemma 4)."""
    branch_norms: bool = field(default=False, metadata=LATER)
    """Attention and perceptron end in a norm, before the residual connection."""
    activation: str = "gelu"  # or "quick_gelu" (CLIP), "gelu_tanh", "silu"
    gated: bool = False
    """The perceptron is gated, as a language model's (Qwen2.5-VL)."""
    bias: bool = field(default=True, metadata=LATER)
    """Matrices have biases; those of query, key and value, and of patches, are named apart."""
    patch_bias: bool = True
    class_token: bool = True
    """A tile has a token of its own beside its patches; images at their own size have none anyway."""
    pre_norm: bool = False
    """A LayerNorm between the embedding and the first layer (CLIP); at native resolution one of the layers' kind, in
    front of learned positions (Pixtral, GLM-4.1V)."""
    final_norm: bool = False
    """A LayerNorm behind the last layer; at native resolution one of the layers' kind."""
    layer_scale: bool = True
    standardized: bool = field(default=False, metadata=LATER)
    """What leaves the ViT, joined, is shifted and scaled by numbers that are not trained (Gemma 4)."""
    pixels: str = "imagenet"  # or "clip", "half": mean and deviation that pixels are brought to
    native: NativeResolution | None = None
    drop_path: float = 0.0
    """Share of tiles that pass a branch of the last layer by in training; it grows from none in the first layer
    (stochastic depth, arXiv 1603.09382)."""
    feature_layers: tuple[int, ...] = ()
    """Layers whose output enters the language model too, the first of them behind its first layer and so on."""
    side_by_side: tuple[int, ...] = field(default=(), metadata=LATER)
    """The projector joins what these layers give in width, in this order, and nothing of it enters later: numbers among
    `feature_layers`, the ViT's output the last one."""

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size and self.class_token:  # SigLIP's leave the rest unseen
            raise UserError(
                f"image size {self.image_size} is no multiple of patch size {self.patch_size}: "
                "patches would not cover the tile"
            )

    @property
    def norm_bias(self) -> bool:
        """The layers' norms have a bias."""
        return self.normalization == "LayerNorm"

    @property
    def patches(self) -> int:
        """Patches of one tile."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that see whole images where others see windows of them; none where all are alike."""
        return self.native.full_layers if self.native and self.native.window else ()

    def heads_over(self, ranks: int) -> int:
        """Heads on tensor-parallel ranks: the next number that `ranks` divides; what is more are zeros."""
        return _filled_up(self.heads, ranks)

    @property
    def tokens_per_tile(self) -> int:
        """ViT tokens of one tile: its patches and the class token, which images at their own size have none of."""
        return self.patches + (self.class_token and self.native is None)


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
    logit_cap: float | None = field(default=None, metadata=LATER)
    """Logits x become cap tanh(x / cap)."""
    image_attention: bool = False
    """Tokens of an image see those of the same image behind them too."""
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
        return one.without_experts if number in self.dense_layers else one

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
        return _filled_up(self.kv_heads, ranks)


@dataclass(frozen=True)
class PromptFormat:
    """What the model reads, as text: what a dataset must have been made with. It changes no size and no cost."""

    image_markup: str = "internvl"  # or "llava": the words around an image (megatron.vlm.data.markup)
    image_token_id: int | None = None
    """Id of the token that stands for one image feature, where it is known."""
    chat_template: str | None = None
    """The template that the model was trained with (megatron.vlm.data.templates), where it is known."""
    tiling: str = "internvl"
    """The rule by which the model was shown images (megatron.vlm.data.media.tiles)."""


@dataclass(frozen=True)
class Architecture:
    """A vision-language model. The projector joins `shuffle` x `shuffle` patches into one LLM token.

    Raises UserError if the patches of a tile cannot be shuffled so.
    """

    name: str
    vision: VisionArchitecture
    language: LanguageArchitecture
    shuffle: int = 2
    projector_norm: bool = True  # InternVL's; LLaVA's two-layer perceptron has none
    projector_bias: bool = True
    pools: bool = False
    """The projector takes the mean of such a square, normalises it and has one matrix alone (Gemma 3)."""
    merger: str = field(default="perceptron", metadata=LATER)
    """How squares of a ViT at native resolution become tokens: "perceptron", of two layers as wide as a square (Qwen);
    "matrix", which makes a patch of a square, in front of two layers (Mistral 3); "gated", two matrices in front of a
    gated perceptron (GLM-4.1V). Of tiles: "shuffled", one matrix alone behind the pixel shuffle (Idefics 3)."""
    merger_width: int = field(default=0, metadata=LATER)
    """Inner width of the gated one."""
    class_token: bool = False
    """The language model gets the tile's class token too."""
    newline: bool = False
    """Tiles of an image are joined, its padding is cut off, and every row ends with a learned token (LLaVA-1.6,
    LLaVA-OneVision)."""
    tied: bool = False
    """Word embedding and head share one weight."""
    prompt: PromptFormat = PromptFormat()
    types: tuple[str, str] = field(default=("internvl", "llama"), compare=False, repr=False)
    """Model types of config.json, of the whole and of its language model: by these the family and the names of weights
    are found. They change no size."""

    def __post_init__(self) -> None:
        side = self.vision.image_size // self.vision.patch_size
        if side % self.shuffle and not self.vision.native:
            raise UserError(
                f"model {self.name!r}: a tile has {side} x {side} patches (image size {self.vision.image_size}, patch "
                f"size {self.vision.patch_size}), which cannot be joined {self.shuffle} x {self.shuffle}; "
                f"the side must be a multiple of {self.shuffle}"
            )
        taken = self.vision.feature_layers
        ascending = all(a < b for a, b in pairwise((-1, *taken, self.vision.layers)))
        if not ascending or self.streams > 1 + self.language.layers:
            raise UserError(
                f"model {self.name!r}: features of the ViT's layers {list(taken)}; supported: ascending numbers below "
                f"{self.vision.layers}, no more than the {self.language.layers} language layers that they enter"
            )

    @property
    def joined_width(self) -> int:
        """Width of what the projector's first matrix multiplies."""
        squares = 1 if self.pools else self.shuffle**2
        return self.vision.hidden_size * squares * max(1, len(self.vision.side_by_side))

    @property
    def streams(self) -> int:
        """Tensors of image tokens behind the projector: hidden states, and features that enter later."""
        return 1 + len(self.vision.feature_layers) * (not self.vision.side_by_side)

    @property
    def untied(self) -> bool:
        """The head has a weight of its own."""
        return not self.tied

    @property
    def image_tokens_per_tile(self) -> int:
        """LLM tokens of one tile, after the pixel shuffle; none of one patch alone (`least_tiles`)."""
        return self.image_tokens(1)

    @property
    def least_tiles(self) -> int:
        """Tiles that become a whole number of LLM tokens."""
        return self.vision.native.merge**2 if self.vision.native else 1

    def image_tokens(self, tiles: int) -> int:
        """LLM tokens of so many tiles."""
        return tiles * self.vision.patches // self.shuffle**2 + tiles * self.class_token

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """The model as one flat list of layer kinds."""
        return layer_chain(self.vision.layers, self.language.layers)

    @property
    def layers_apart(self) -> dict[str, tuple[int, ...]]:
        """Layers that differ from others of their kind in the chain: by the name that their costs and weights stand
        under, numbers among that kind's."""
        language = self.language
        found = {FULL: self.vision.full_layers, LINEAR: language.linear_layers, FAR: language.far_layers}
        found |= {DENSE: language.dense_layers}
        return {name: layers for name, layers in found.items() if layers}

    @property
    def cost_kinds(self) -> tuple[str, ...]:
        """What the costs of every layer of the chain stand under."""
        return cost_kinds(self.chain, self.layers_apart)

    @cached_property
    def features_after(self) -> tuple[int, ...]:
        """How many features travel beside the output of every layer of the chain."""
        return features_after(self.chain, self.vision.feature_layers, bool(self.vision.side_by_side))

    @property
    def hash(self) -> str:
        """Names the sizes: two models with the same hash can share a profile and a plan."""
        sizes = {name: value for name, value in _hashed(self).items() if name not in ("prompt", "types")}
        text = json.dumps(sizes, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hashed(value: Any) -> Any:
    """Fields by name, without those that came `LATER` and say nothing."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(one, getattr(value, one.name)) for one in dataclasses.fields(value)]
    return {one.name: _hashed(found) for one, found in fields if not (one.metadata and found == one.default)}


def differences(one: Architecture, other: Architecture) -> list[tuple[str, object, object]]:
    """What two models compute differently: name of the field, and both values.

    Their names do not count, nor the length at which a sample gets too long for one of them or is turned otherwise.
    """
    first, second = (_flat(dataclasses.asdict(model)) for model in map(_as_for_short_samples, (one, other)))
    compared = first.keys() - {"name", "types", "language.max_positions"}
    return [(name, first[name], second[name]) for name in sorted(compared) if first[name] != second[name]]


def _as_for_short_samples(model: Architecture) -> Architecture:
    scaling = model.language.rope_scaling
    if scaling is None or scaling.kind != "dynamic":
        return model
    return replace(model, language=replace(model.language, rope_scaling=None))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict) and name in ("vision", "language")
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
