"""Presets of Gemma 4's models, a line each."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text, tower

LARGE = tower(27, 1152, 16, 4304, num_key_value_heads=16, head_dim=72, standardize=True)
SMALL = {"use_clipped_linears": True}
INPUTS = {"hidden_size_per_layer_input": 256, "sliding_window": 512, "use_bidirectional_attention": None}
FEW_GLOBAL = ["full_attention" if number % 5 == 4 else "sliding_attention" for number in range(35)]
EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


def gemma_4_text(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return a language model's config.json: global layers with heads 512 wide, whose keys serve as values."""
    usual = {"sliding_window": 1024, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
    usual |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
    return text(*sizes, 262144) | usual | more


def _gemma(tower: dict[str, Any], *sizes: int, **more: Any) -> Preset:
    return Preset({"model_type": "gemma4", "vision_config": tower, "text_config": gemma_4_text(*sizes, **more)})


PRESETS = {
    "gemma-4-e2b": _gemma(
        SMALL, 35, 1536, 8, 1, 6144, attention_k_eq_v=False, layer_types=FEW_GLOBAL, num_kv_shared_layers=20,
        use_double_wide_mlp=True, **INPUTS,
    ),
    "gemma-4-e4b": _gemma(
        SMALL, 42, 2560, 8, 2, 10240, attention_k_eq_v=False, num_kv_shared_layers=18, **INPUTS
    ),
    "gemma-4-31b": _gemma(LARGE, 60, 5376, 32, 16, 21504, num_global_key_value_heads=4),
    "gemma-4-26b-a4b": _gemma(LARGE, 30, 2816, 16, 8, 2112, num_global_key_value_heads=2, **EXPERTS),
}  # fmt: skip
