"""A ViT as plain data: the sizes that the planner prices, and what the trainer builds from them."""

from dataclasses import dataclass, field

from omnibal_ext.architectures.fields import LATER, filled_up
from omnibal_ext.errors import UserError


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
    """Those that run: a model that reads its features before the last layers has that many fewer. 0: patches go as they
    are embedded to the projector, and there are no heads (Gemma 4 without towers)."""
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
    query_key_norms: bool = field(default=False, metadata=LATER)
    """RMSNorm of every head's query and key by itself (GLM-OCR)."""
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
    embedding_norms: bool = field(default=False, metadata=LATER)
    """LayerNorms of a patch's pixels, of what their matrix gives, and of that at its place, with PyTorch's epsilon
    (Gemma 4 without towers); at native resolution."""
    layer_scale: bool = True
    clipped: bool = field(default=False, metadata=LATER)
    """Matrices clamp what goes in and what comes out, by numbers that are not trained (Gemma 4's small models)."""
    standardized: bool = field(default=False, metadata=LATER)
    """What leaves the ViT, joined, is shifted and scaled by numbers that are not trained (Gemma 4)."""
    pixels: str = "imagenet"  # or "clip", "half", "unit": mean and deviation that pixels are brought to
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
    def norms_heads(self) -> bool:
        """Every head's query and key are normalised by themselves."""
        return self.head_norms or self.query_key_norms

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
        return filled_up(self.heads, ranks)

    @property
    def tokens_per_tile(self) -> int:
        """ViT tokens of one tile: its patches and the class token, which images at their own size have none of."""
        return self.patches + (self.class_token and self.native is None)
