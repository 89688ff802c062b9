"""Rates of parts of the model: which weights they are of."""

from argparse import Namespace

import pytest
import torch

from megatron.vlm.rates import part_overrides

RATES = {"vit": 1e-4, "projector": 1e-3}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("module.module.links.patch_embed.projection.weight", "vit"),
        ("module.module.links.vit_11.mlp.linear_fc1.weight", "vit"),
        ("module.links.projector.vision_norm.weight", "vit"), ("module.links.projector.norm.weight", "projector"),
        ("module.links.projector.linear_fc1.weight", "projector"), ("module.links.llm_0.mlp.linear_fc1.weight", None),
        ("module.links.head.norm.weight", None),
    ],
)  # fmt: skip
def test_each_weight_has_the_rate_of_its_part(name: str, part: str | None) -> None:
    """The ViT's last norm that of the ViT, though it lies in the projector's layer."""
    given = {f"weight_decay_{one}": None for one in RATES} | {f"lr_{one}": rate for one, rate in RATES.items()}
    overrides = part_overrides(Namespace(lr=1e-2, min_lr=0.0, **given))
    found = [one["max_lr"] for key, one in overrides.items() if key.matches(torch.nn.Parameter(torch.ones(1)), name)]
    assert found == ([RATES[part]] if part else [])
