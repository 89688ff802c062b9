"""Gemma 4's models, a line each."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import (
    FarHeads,
    LanguageArchitecture,
    LayerInputs,
    RopeScaling,
    SharedKeys,
    SlidingWindow,
)
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture

VISION = VisionArchitecture(
    27, 1152, 16, 4304, 16, 16, "RMSNorm", qkv_bias=False, head_norms=True, branch_norms=True, activation="gelu_tanh",
    gated=True, bias=False, patch_bias=False, layer_scale=False, standardized=True, pixels="half",
    native=NativeResolution(3, 1, theta=100.0, axis_positions=10240, by_halves=True),
)  # fmt: skip


SMALL_VISION = replace(
    VISION, layers=16, hidden_size=768, heads=12, ffn_hidden_size=3072, standardized=False, clipped=True
)


def gemma_4(
    name: str,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    far_kv_heads: int,
    ffn_hidden_size: int,
    experts: Experts | None = None,
) -> Architecture:
    """Gemma 4 with these sizes: every sixth layer is global, with heads of 512 numbers whose keys are values."""
    near = tuple(layer for layer in range(layers) if (layer + 1) % 6)
    language = LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, vocab_size=262144, norm_epsilon=1e-6, qk_norm=True,
        head_size=256, rope_scaling=RopeScaling("proportional", 1.0, turning=0.25), activation="gelu_tanh",
        branch_norms=True, scaled_words=True, query_scale=1,
        sliding=SlidingWindow(1024, near, 1e4, images_here_alone=True), far=FarHeads(far_kv_heads, 512, True),
        value_norm=True, layer_scalar=True, logit_cap=30.0, image_attention=True, experts=experts,
    )  # fmt: skip
    prompt = PromptFormat("gemma4", 258880, "gemma4", "gemma4")
    return Architecture(
        name, VISION, language, shuffle=3, pools=True, projector_norm=False, tied=True, prompt=prompt,
        types=("gemma4", "gemma4_text"),
    )  # fmt: skip


def _gemma_with_inputs(
    name: str, layers: int, pattern: int, hidden_size: int, kv_heads: int, ffn_hidden_size: int, shared: SharedKeys
) -> Architecture:
    """Images are seen in one direction; of so many layers one sees all tokens, with as many heads as the others."""
    model = gemma_4(name, layers, hidden_size, 8, kv_heads, kv_heads, ffn_hidden_size)
    near = tuple(layer for layer in range(layers) if (layer + 1) % pattern)
    language = replace(
        model.language, sliding=SlidingWindow(512, near, 1e4, images_here_alone=True), image_attention=False,
        far=FarHeads(kv_heads, 512, False), layer_inputs=LayerInputs(256, 262144, blank=0), shared_keys=shared,
    )  # fmt: skip
    return replace(model, vision=SMALL_VISION, language=language)


PRESETS = {
    "gemma-4-e2b": _gemma_with_inputs("gemma-4-e2b", 35, 5, 1536, 1, 6144, SharedKeys(20, widens=True)),
    "gemma-4-e4b": _gemma_with_inputs("gemma-4-e4b", 42, 6, 2560, 2, 10240, SharedKeys(18, widens=False)),
    "gemma-4-31b": gemma_4("gemma-4-31b", 60, 5376, 32, 16, 4, 21504),
    "gemma-4-26b-a4b": gemma_4("gemma-4-26b-a4b", 30, 2816, 16, 8, 2, 704, Experts(128, 8, balance=0.0, beside=2112)),
}
