"""A ViT as plain data: the sizes that the planner prices, and what the trainer builds from them."""

from dataclasses import dataclass, field

from omnibal_ext.errors import UserError
from omnibal_ext.modalities.fields import LATER, UNPRICED, filled_up


@dataclass(frozen=True)
class VideoClock:
    """TMRoPE (Qwen2.5-Omni, arXiv 2503.20215): a video's positions in time and its sound's are of one clock.

    Text continues behind the last position of all three axes.
    """

    per_second: float
    """Positions a second; a token of sound takes one."""
    chunk_seconds: float | None = None
    """A video and its sound take turns in chunks of so many seconds, positions are rounded down to integers, and the
    two tokens at either end of both share one (Qwen2.5-Omni). None: each token of sound is behind the steps that have
    begun, and positions are fractions (Qwen3-Omni)."""

    def __str__(self) -> str:
        turns = "step by step" if self.chunk_seconds is None else f"in turns of {self.chunk_seconds:g} seconds"
        return f"{self.per_second:g} positions a second, a video and its sound {turns}"


@dataclass(frozen=True)
class NativeResolution:
    """A ViT that sees images at their own size, as patches with two-dimensional positions."""

    merge: int = 2
    """merge x merge patches become one LLM token."""
    frames: int = 2
    """Frames in a patch (temporal patch size); an image is repeated."""
    window: int | None = None
    """Side of an attention window, in squares of merge x merge patches; None: no windows."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows."""
    theta: float = 1e4
    columns_between: bool = field(default=False, metadata=LATER)
    """Rows rotate by even frequencies, columns by odd ones (Pixtral); else both by the same."""
    learned_positions: int | None = None
    """Side of a square of learned positions, interpolated to an image's size and added to the rotation; None: none."""
    axis_positions: int | None = field(default=None, metadata=LATER)
    """Learned positions for rows, and as many for columns; a patch adds one of each (Gemma 4); None: none."""
    by_halves: bool = field(default=False, metadata=LATER)
    """Columns rotate the first half of a head and rows the second. Else the two numbers of a pair are half a head
    apart, and rows rotate the first pairs."""
    bicubic: bool = field(default=False, metadata=LATER)
    """Learned positions are interpolated bicubically, align_corners=False (GLM-4.1V); else bilinearly, True."""
    edges_aligned: bool = field(default=False, metadata=LATER)
    """Bilinearly, but with align_corners=False (PaddleOCR-VL)."""
    positions_per_second: float | None = None
    """Temporal M-RoPE positions per second of video; None: one per temporal patch."""
    clock: VideoClock | None = field(default=None, metadata=UNPRICED)
    """Clock of videos that may be heard too; None: `positions_per_second` decides."""

    @property
    def around(self) -> int:
        """How many learned positions a patch's is interpolated from; 0: there are none."""
        return 0 if self.learned_positions is None else 16 if self.bicubic else 4


@dataclass(frozen=True)
class VisionArchitecture:
    """A ViT for square tiles of `image_size` pixels. The defaults are InternViT-300M's.

    At native resolution a tile is a patch: numbers of tiles are numbers of patches.
    """

    layers: int
    """Layers that run; those after the last feature layer are left out. 0: embedded patches go to the projector
    directly, and `heads` is unused (Gemma 4 without towers)."""
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
    """The MLP is gated, as a language model's (Qwen2.5-VL)."""
    bias: bool = field(default=True, metadata=LATER)
    """Biases of matrices other than query, key, value (`qkv_bias`) and patches (`patch_bias`)."""
    patch_bias: bool = True
    class_token: bool = True
    """A tile has a class token in addition to its patches; ignored at native resolution."""
    pre_norm: bool = False
    """A LayerNorm between the embedding and the first layer (CLIP); at native resolution of the type `normalization`,
    before learned positions are added (Pixtral, GLM-4.1V)."""
    final_norm: bool = False
    """A LayerNorm after the last layer; at native resolution of the type `normalization`."""
    embedding_norms: bool = field(default=False, metadata=LATER)
    """LayerNorms of a patch's pixels, of its embedding, and of that plus its position, with PyTorch's epsilon; at
    native resolution (Gemma 4 without towers)."""
    layer_scale: bool = True
    clipped: bool = field(default=False, metadata=LATER)
    """Inputs and outputs of linear layers are clamped to stored limits, not trained (small Gemma 4 models)."""
    standardized: bool = field(default=False, metadata=LATER)
    """The ViT's output, joined, is shifted and scaled by stored numbers, not trained (Gemma 4)."""
    pixels: str = "imagenet"  # or "clip", "half", "unit": mean and deviation for normalising pixels
    native: NativeResolution | None = None
    drop_path: float = 0.0
    """Probability that a tile skips a branch of the last layer in training, rising linearly from 0 in the first layer
    (stochastic depth, arXiv 1603.09382)."""
    feature_layers: tuple[int, ...] = ()
    """Layers whose output (a feature) also enters the language model: the n-th is added after its n-th layer."""
    side_by_side: tuple[int, ...] = field(default=(), metadata=LATER)
    """The projector concatenates features instead, in this order, and none enters the language model: indices into
    `feature_layers`, with the ViT's output as the last one."""
    unread: int = field(default=0, metadata=UNPRICED, compare=False)
    """Layers that config.json names behind the last one whose output is read. No effect on what is computed."""

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size and self.class_token:  # SigLIP ignores the remaining pixels
            raise UserError(
                f"image size {self.image_size} is no multiple of patch size {self.patch_size}: "
                "patches would not cover the tile"
            )

    @property
    def norms_heads(self) -> bool:
        """Whether every head's query and key are normalised by themselves."""
        return self.head_norms or self.query_key_norms

    @property
    def norm_bias(self) -> bool:
        """Whether the layers' norms have a bias."""
        return self.normalization == "LayerNorm"

    @property
    def patches(self) -> int:
        """Patches of one tile."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Numbers of the layers without attention windows, where others have windows; else ()."""
        return self.native.full_layers if self.native and self.native.window else ()

    def heads_over(self, ranks: int) -> int:
        """Return how many heads `ranks` tensor ranks have in all: padded with zeros to a multiple of `ranks`."""
        return filled_up(self.heads, ranks)

    @property
    def tokens_per_tile(self) -> int:
        """ViT tokens of one tile: its patches and, except at native resolution, the class token."""
        return self.patches + (self.class_token and self.native is None)

    def rows(self, tiles: int) -> int:
        """Return how many rows the ViT's layers see of so many tiles: all tokens of each."""
        return tiles * self.tokens_per_tile
