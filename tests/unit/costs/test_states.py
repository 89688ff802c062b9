"""Bytes a weight, by Megatron's flags: everywhere that bytes are counted, the same."""

import json
from argparse import Namespace
from itertools import product

import pytest
import torch

from benchmarks.recipes import RECIPES
from megatron.vlm.preflight.machine import _state_bytes
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.states import DTYPES, SIZES, WeightBytes, state_words
from omnibal_ext.units import GIB

PUBLISHED = 8.53e9
"""Weights of InternVL3.5-8B, of its model card: .304 in the ViT, .033 in the projector, 8.19 in the language model."""
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def flags(is_aware: bool = True, **precisions: object) -> Namespace:
    return Namespace(**{"use_precision_aware_optimizer": is_aware, **dict.fromkeys(DTYPES, "fp32"), **precisions})


def test_a_weight_takes_what_megatron_and_transformer_engine_say() -> None:
    assert WeightBytes.of(flags(False), half=False).on_a_rank() == 16
    assert WeightBytes.of(flags(False)).on_a_rank() == 18
    assert WeightBytes.of(flags(False)).on_a_rank(4) == 2 + 4 + 3
    for chosen in product(*DTYPES.values()):
        named = dict(zip(DTYPES, chosen, strict=True))
        gradient, _, first, second = (SIZES[precision] for precision in chosen)
        each = WeightBytes.of(flags(**named))
        assert each == WeightBytes(2, gradient, 2 + first + second)
        assert each == WeightBytes.of(flags(**{name: TORCH[precision] for name, precision in named.items()}))
    assert state_words(flags(False)) == []
    assert state_words(flags(exp_avg_dtype="bf16"))[:1] == ["--use-precision-aware-optimizer"]


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_profiles_and_checks_count_alike(moments: str, replicas: int) -> None:
    model, wanted = preset("internvl3.5-8b"), flags(exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    states = WeightBytes.of(wanted)
    profile = analytic_profile(model, "h200", {"tiles": 1, "tokens": 1}, 1, replicas, states=states)
    planned = sum(profile.layers[kind].weight_bytes for kind in profile.cost_kinds)
    args = Namespace(
        **vars(wanted), bf16=True, fp16=False, freeze=[], tensor_model_parallel_size=1, data_parallel_size=replicas,
        expert_model_parallel_size=1, pipeline_model_parallel_size=1, use_distributed_optimizer=True, lora_rank=None,
        lora_alpha=None, lora_targets=None,
    )  # fmt: skip
    assert Adapters.of(args).rank == 0
    assert planned == pytest.approx(_state_bytes(args, model))
    weights = sum(profile.parameters[kind] for kind in profile.cost_kinds)
    assert planned == pytest.approx(weights * states.on_a_rank(replicas))


def test_all_weights_of_an_8b_are_planned_on_one_h200() -> None:
    """Within 3% of the arithmetic: 12 bytes a weight are 95 GiB, 10 are 79; 18 would be 143, more than it has."""
    recipe = json.loads((RECIPES / "internvl3.5-8b-1xh200.json").read_text())
    given = {name.replace("-", "_"): value for name, value in recipe["flags"].items()}
    for bytes_a_weight, gib, more in ((12, 95, {}), (10, 79, {"main_grads_dtype": "bf16"})):
        states = WeightBytes.of(flags(**{name: given[name] for name in DTYPES if name in given}, **more))
        assert states.on_a_rank() == bytes_a_weight
        profile = analytic_profile(preset(given["model"]), "h200", {"tiles": 16, "tokens": 8192}, states=states)
        planned = sum(profile.layers[kind].weight_bytes for kind in profile.cost_kinds)
        assert planned == pytest.approx(bytes_a_weight * PUBLISHED, rel=0.03)
        assert planned / GIB == pytest.approx(gib, rel=0.03)
    assert recipe["predicted"]["memory_gib"] <= given["memory_gib"] < 141e9 / GIB < 18 * PUBLISHED / GIB
