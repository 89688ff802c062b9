"""What float8 would gain is measured on the products of training, each with its own scale."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import nn

from megatron.vlm.models.chain import Chain
from megatron.vlm.profiling import float8
from megatron.vlm.profiling.stage_pass import wrapped_stage
from tests.unit.alone import megatron_alone

COST: Any = SimpleNamespace(forward_seconds=10.0, backward_seconds=20.0)


@pytest.mark.parametrize("seed", range(3))
def test_products_in_float8_are_those_in_half(seed: int) -> None:
    """To the rounding of two and three bits, whatever each tensor's size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {(48, 32): 1e-3, (64, 32): 1.0, (48, 64): 1e3}
    given = [(torch.randn(shape, generator=generator) * scale).bfloat16() for shape, scale in sizes.items()]
    for ours, exact in zip(float8.in_float8(*given), float8.in_half(*(one.float() for one in given)), strict=True):
        assert ours.shape == exact.shape
        assert (ours.float() - exact).norm() < 0.08 * exact.norm()


def test_the_layer_gains_what_its_matrices_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """By seconds made up: bf16 takes one for each 16 rows, float8 half of it and one. Routers, norms and matrices that
    float8 cannot multiply gain nothing."""
    asked = []

    def seconds(way: Any, shape: torch.Size, tokens: int, steps: int) -> float:
        asked.append((tokens, steps))
        return shape[0] / 16 if way is float8.in_half else shape[0] / 32 + 1

    monkeypatch.setattr(float8, "_seconds", seconds)
    layer = nn.ModuleDict({"linear_fc1": nn.Linear(32, 128), "linear_fc2": nn.Linear(128, 32), "norm": nn.LayerNorm(32),
                           "linear_odd": nn.Linear(32, 24), "router": nn.Linear(32, 32, bias=False)})  # fmt: skip
    stage: Any = SimpleNamespace(run_layers=[(3, layer)])
    found = float8.float8_gains(stage, COST, 47, 5)
    assert found == {"linear_fc1": 8 / 5, "linear_fc2": 1.0, "layer": 30 / 27}
    assert set(asked) == {(32, 5)}, "rows that float8 multiplies"
    assert float8.float8_gains(stage, COST, 15, 5) == {}


def test_a_product_that_fails_leaves_the_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(float8, "_seconds", fails)
    stage: Any = SimpleNamespace(run_layers=[(3, nn.ModuleDict({"linear_fc1": nn.Linear(32, 128)}))])
    assert float8.float8_gains(stage, COST, 64, 5) == {}
    assert capsys.readouterr().err == "float8 was not measured: CUDA out of memory.\n"


@pytest.mark.parametrize("kind", ["vit", "llm"])
def test_every_matrix_of_a_layer_is_measured(kind: str) -> None:
    """For real, on the CPU."""
    with megatron_alone("tiny") as inputs:
        chain = Chain.of(inputs.args, inputs.architecture)
        layer = chain.kinds.index(kind)
        stage = unwrap_model(wrapped_stage(chain, layer, layer + 1))
        found = float8.float8_gains(stage, COST, 64, 1)
    assert found.keys() == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "layer"}
    assert min(found.values()) > 0
