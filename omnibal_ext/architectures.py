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
VISION_TOWERS = {
    "internvit-6b": INTERNVIT_6B,
    "internvit-300m": VisionArchitecture(layers=24, hidden_size=1024, heads=16, ffn_hidden_size=4096),
    # EVA-CLIP (arXiv 2303.15389, 2402.04252), sizes only: what the planner needs.
    "eva-clip-1b": VisionArchitecture(layers=40, hidden_size=1408, heads=16, ffn_hidden_size=6144),
    "eva-clip-8b": VisionArchitecture(layers=32, hidden_size=4096, heads=32, ffn_hidden_size=20480),
    "eva-clip-18b": VisionArchitecture(layers=48, hidden_size=5120, heads=40, ffn_hidden_size=25600),
}
LANGUAGE_MODELS = {
    "internlm2-20b": INTERNLM2_20B,
    "yi-34b": LanguageArchitecture(60, 7168, 56, 8, 20480, vocab_size=64000, rope_theta=5e6),
    "llama3-8b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=128256, rope_theta=5e5),
    "llama3-70b": LanguageArchitecture(80, 8192, 64, 8, 28672, vocab_size=128256, rope_theta=5e5),
    "qwen1.5-110b": LanguageArchitecture(80, 8192, 64, 8, 49152, vocab_size=152064, qkv_bias=True),
    "vicuna-7b": LanguageArchitecture(32, 4096, 32, 32, 11008, vocab_size=32000, rope_theta=1e4),
}

PRESETS: dict[str, Architecture] = {
    preset.name: preset
    for preset in (
        Architecture(
            "tiny",
            VisionArchitecture(layers=4, hidden_size=64, heads=4, ffn_hidden_size=256, patch_size=8, image_size=32),
            LanguageArchitecture(
                layers=3, hidden_size=128, heads=4, kv_heads=2, ffn_hidden_size=352, vocab_size=512, rope_theta=1e4
            ),
        ),
        Architecture("internvl-chat-1.5", INTERNVIT_6B, INTERNLM2_20B),
    )
}


def preset(name: str) -> Architecture:
    """The preset of that name, or VISION+LANGUAGE put together ("internvit-6b+yi-34b").

    Raises UserError naming the known ones.
    """
    if name in PRESETS:
        return PRESETS[name]
    vision, _, language = name.partition("+")
    if vision in VISION_TOWERS and language in LANGUAGE_MODELS:
        return Architecture(name, VISION_TOWERS[vision], LANGUAGE_MODELS[language])
    raise UserError(
        f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}, or one of {', '.join(VISION_TOWERS)}, then +, "
        f"then one of {', '.join(LANGUAGE_MODELS)}"
    )
