"""Features that travel beside the hidden states: how many at each cut, and what they cost in seconds and bytes."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import layer_chain
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.flow import features_after
from omnibal_ext.layout.partition import cut_bytes
from omnibal_ext.layout.problem import Layout, LayoutProblem

from .instances import make_profile


def test_features_travel_from_their_vit_layer_to_their_language_layer() -> None:
    """Of layers 1 and 2: the first enters behind llm.0, the second behind llm.1."""
    chain = layer_chain(4, 3)
    assert dict(zip(range(len(chain)), features_after(chain, (1, 2)), strict=True)) == {
        0: 0, 1: 0, 2: 1, 3: 2, 4: 2,  # patch_embed, vit.0 to vit.3
        5: 2, 6: 2,  # projector, word_embed
        7: 1, 8: 0, 9: 0, 10: 0,  # llm.0 to llm.2, head
    }  # fmt: skip
    assert set(features_after(chain, ())) == {0}


def test_features_side_by_side_travel_to_the_projector() -> None:
    chain = layer_chain(4, 3)
    assert features_after(chain, (1, 2), joined=True) == (0, 0, 1, 2, 2, 0, 0, 0, 0, 0, 0)


def test_analytic_features_side_by_side_are_those_of_the_model() -> None:
    """ViP-LLaVA-7B: a LayerNorm, 5 x 1024 to 4096 and 4096 to 4096; one tensor of image tokens goes on."""
    profile = analytic_profile(preset("vip-llava-7b"), "h100", 16, 2048)
    assert profile.parameters["projector"] == 5 * 1024 * 4096 + 4096 * 4096
    assert [profile.features_after[1 + layer] for layer in (4, 5, 13, 16, 19, 22)] == [0, 1, 2, 3, 4, 4]
    assert not any(profile.features_after[24:])
    image = profile.layers["projector"].output_bytes
    assert image == 16 * 576 * 4096 * 2
    assert cut_bytes(profile)[24] == image


@pytest.mark.parametrize(
    ("edge", "features", "output"), [(3, 1, 4.0), (5, 2, 4.0), (6, 2, 1.0), (7, 2, 1.0), (8, 1, 2.0)]
)
def test_a_cut_carries_and_keeps_them(edge: int, features: int, output: float) -> None:
    """Outputs of ViT layers are 4 bytes, of projector and word embedding 1, of language layers 2."""
    plain = replace(make_profile(4, 3), transfer_seconds_per_byte=0.5, transfer_latency_seconds=0.25)
    profile = replace(plain, feature_layers=(1, 2))
    layout = Layout((0, edge, 11), ((), ()))
    with_them, without = (LayoutProblem(one, ranks=2, microbatches=3) for one in (profile, plain))
    assert with_them.stage_costs(layout).transfer[0].tolist() == [0.25 + 0.5 * output * (1 + features)] * 3
    assert without.stage_costs(layout).transfer[0].tolist() == [0.25 + 0.5 * output] * 3
    assert cut_bytes(profile)[edge - 1] == output * (1 + features)
    more = np.subtract(with_them.stage_peak_bytes(layout), without.stage_peak_bytes(layout))
    assert more.tolist() == [0.0, features * output]  # the last rank has one microbatch in flight
    assert with_them.step_seconds(layout) > without.step_seconds(layout)


def test_one_rank_carries_nothing() -> None:
    problem = LayoutProblem(replace(make_profile(4, 3), transfer_seconds_per_byte=0.5, feature_layers=(1,)), 1, 2)
    assert not problem.transfers.any()


def test_analytic_mergers_are_those_of_the_model() -> None:
    """Qwen3-VL-8B: four mergers of 4608 x 4608 and 4608 x 4096; a token's features are as wide as its state."""
    profile = analytic_profile(preset("qwen3-vl-8b"), "h100", 4096, 2048)
    assert profile.parameters["projector"] == 4 * (4608 * 4608 + 4608 * 4096)
    assert profile.parameters["patch_embed"] == 3 * 16 * 16 * 2 * 1152 + 2304 * 1152
    assert profile.features_after[28] == 3
    assert cut_bytes(profile)[profile.chain.index("llm") - 1] == 4 * 2048 * 4096 * 2
