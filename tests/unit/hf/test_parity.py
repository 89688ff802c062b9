"""Logits, loss and gradients of every family are those of transformers; a pack gives what its samples give alone."""

from functools import cache

import pytest

from tests.distributed.conftest import run_program
from tests.programs import ENGINE, PLAIN
from tests.unit.hf.models import CLAMPING, FAMILIES

pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
TOLERANCE = 2e-5  # seen: 2e-6
OF_DECAY = 2e-4
"""Of gradients of models with linear attention: that of what a state keeps is a small difference of large sums."""


OF_A_KIND = (
    "internvl", "internvl qk-norm rmsnorm", "internvl qk-norm layernorm, biases, last norm", "internvl 3.5-38b",
    "internvl yarn, groups of heads that two ranks do not share evenly", "internvl qwen3-moe", "llava",
    "llava-onevision tied", "gemma 3", "gemma 4", "gemma 4 moe", "gemma 4 with inputs of layers", "gemma 4 unified",
    CLAMPING, "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe", "idefics 3",
    "mistral 3", "glm-4.1v", "glm-4.5v, groups of experts, two dense layers", "paligemma 2",
)  # fmt: skip
"""One family of every kind of layer: Transformer Engine has its own layers, all else is as without it."""
WAYS = {
    "one rank": (1, PLAIN, tuple(FAMILIES)),
    "two tensor-parallel ranks": (2, PLAIN, tuple(FAMILIES)),
    "two tensor-parallel ranks, Transformer Engine": (2, ENGINE, OF_A_KIND),
}
CASES = [(way, family) for way, (_, _, families) in WAYS.items() for family in families]


@cache
def differences(way: str) -> dict[str, dict[str, float]]:
    ranks, server, families = WAYS[way]
    return run_program("tests.unit.hf.parity", ranks, *families, server=server)  # Megatron starts once


@pytest.mark.parametrize(("way", "family"), CASES)
def test_a_family_equals_transformers(way: str, family: str) -> None:
    found = differences(way)[family]
    assert found["scale"] > 1, "logits so small that any model would pass"
    assert found["logits"] < TOLERANCE
    assert found["loss"] < TOLERANCE
    assert found["gradients"] < (OF_DECAY if family.startswith("qwen3.5") else TOLERANCE)


@pytest.mark.parametrize(("way", "family"), CASES)
def test_saved_weights_go_back_bit_by_bit(way: str, family: str) -> None:
    """Read by Megatron at this tensor-parallel size, saved by it, exported: names, files and bits are the same."""
    assert not differences(way)[family]["bits lost"]


@pytest.mark.parametrize(("way", "family"), CASES)
def test_freezing_the_vit_freezes_what_transformers_has_in_its_tower(way: str, family: str) -> None:
    """Its last norm too, which lies in the projector's link, and which freezing the projector leaves trained."""
    assert not differences(way)[family]["frozen otherwise"]
