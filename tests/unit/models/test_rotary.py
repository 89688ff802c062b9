"""Angles are transformers', scaled or not, and count from the start of each sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.attention.rotary import Rotary, rotary_frequencies
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.language.rope import Rope, RopeScaling

ROPE, WIDTH = Rope(5e5), 128
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


YARN = RopeScaling("yarn", 4.0, 1.0, 32.0, 4096)
SCALINGS = [
    None, RopeScaling("linear", 2.5), LLAMA3, replace(LLAMA3, factor=32.0), YARN,
    replace(YARN, low_frequency_factor=2.0, high_frequency_factor=8.0, original_positions=16, whole_dimensions=False),
]  # fmt: skip


def of_transformers(rope: dict[str, Any], most: int = 2048) -> Any:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": most}
    return llama.LlamaRotaryEmbedding(llama.LlamaConfig(**sizes, rope_parameters=rope))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: RopeScaling | None) -> None:
    rope = {"rope_type": scaling.kind if scaling else "default", "rope_theta": ROPE.theta}
    if scaling:
        rope["factor"] = scaling.factor
    if scaling and scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
        rope["original_max_position_embeddings"] = scaling.original_positions
    if scaling and scaling.kind == "yarn":
        rope |= {"beta_slow": scaling.low_frequency_factor, "beta_fast": scaling.high_frequency_factor}
        rope |= {"original_max_position_embeddings": scaling.original_positions, "truncate": scaling.whole_dimensions}
    theirs = of_transformers(rope)
    ours = rotary_frequencies(replace(ROPE, scaling=scaling), WIDTH)
    assert torch.allclose(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert (scaling.attention_factor if scaling else 1.0) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("lengths", [(3, 8), (9, 40, 5, 17)])
def test_dynamic_scaling_turns_each_sample_by_its_own_length(lengths: tuple[int, ...]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": ROPE.theta, "factor": 2.0}
    scaling = RopeScaling("dynamic", 2.0, original_positions=8)
    rotary = Rotary(replace(ROPE, scaling=scaling), WIDTH)
    ours = rotary.angles(Microbatch(lengths, len(lengths), sum(lengths))).flatten(1)
    theirs = [of_transformers(rope, 8)(ours, torch.arange(length)[None])[0][0] for length in lengths]
    assert torch.allclose(ours.cos(), torch.cat(theirs), atol=2e-6)


def test_every_sample_counts_from_zero() -> None:
    rotary = Rotary(ROPE, WIDTH)
    packed, alone = (rotary.angles(Microbatch(lengths, len(lengths), sum(lengths))) for lengths in ((5, 3), (3,)))
    assert packed.shape == (8, 1, 1, 128)
    assert torch.equal(packed[5:], alone)
    assert torch.equal(packed[:3], alone)


def test_a_sample_beyond_the_exact_length_is_refused() -> None:
    rotary = Rotary(ROPE, WIDTH, max_positions=4)
    rotary.angles(Microbatch((4, 4), 2, 8))
    with pytest.raises(UserError, match="a sample of 5 tokens; beyond 4"):
        rotary.angles(Microbatch((4, 5), 2, 9))
