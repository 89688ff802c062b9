"""The models we know, as plain data: sizes that the planner prices and the trainer builds.

Sources: the published configurations of InternViT, InternLM2 and InternVL (sizes as in REFERENCE section 2).
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from omnibal_ext.chain import layer_chain
from omnibal_ext.errors import UserError


@dataclass(frozen=True)
class VisionArchitecture:
    """A ViT that sees square tiles of `image_size` pixels."""

    layers: int
    hidden_size: int
    heads: int
    ffn_hidden_size: int
    patch_size: int = 14
    image_size: int = 448
    normalization: str = "LayerNorm"  # or "RMSNorm"
    norm_epsilon: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False  # over the full width of query and key, not per head (InternViT-6B)

    @property
    def patches(self) -> int:
        """Patches of one tile."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens_per_tile(self) -> int:
        """ViT tokens of one tile: its patches and the class token."""
        return self.patches + 1


@dataclass(frozen=True)
class LanguageArchitecture:
    """A decoder-only language model: RMSNorm, SwiGLU, rotary positions, grouped-query attention."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """A vision-language model. The projector shuffles `shuffle` x `shuffle` patches into one LLM token."""

    name: str
    vision: VisionArchitecture
    language: LanguageArchitecture
    shuffle: int = 2

    @property
    def image_tokens_per_tile(self) -> int:
        """LLM tokens of one tile, after the pixel shuffle."""
        return self.vision.patches // self.shuffle**2

    @property
    def chain(self) -> tuple[str, ...]:
        """The model as one flat list of layer kinds."""
        return layer_chain(self.vision.layers, self.language.layers)

    @property
    def hash(self) -> str:
        """Names the sizes: two models with the same hash can share a profile and a plan."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


INTERNVIT_6B = VisionArchitecture(
    layers=45, hidden_size=3200, heads=25, ffn_hidden_size=12800, normalization="RMSNorm", qkv_bias=False, qk_norm=True
)
INTERNLM2_20B = LanguageArchitecture(
    layers=48, hidden_size=6144, heads=48, kv_heads=8, ffn_hidden_size=16384, vocab_size=92553
)

PRESETS: dict[str, Architecture] = {
    preset.name: preset
    for preset in (
        Architecture(
            "tiny",
            VisionArchitecture(layers=4, hidden_size=64, heads=4, ffn_hidden_size=256, patch_size=8, image_size=32),
            LanguageArchitecture(
                layers=4, hidden_size=128, heads=4, kv_heads=2, ffn_hidden_size=352, vocab_size=512, rope_theta=1e4
            ),
        ),
        Architecture("internvl-chat-1.5", INTERNVIT_6B, INTERNLM2_20B),
    )
}


def preset(name: str) -> Architecture:
    """The preset of that name; `UserError` naming the known ones if there is none."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
    return PRESETS[name]
