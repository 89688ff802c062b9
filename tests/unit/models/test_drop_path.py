"""Drop path: in training tiles pass branches of a ViT layer by, whole or not at all, more often in later layers."""

from dataclasses import replace

import pytest
import torch

from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.media import Images, together
from megatron.vlm.models.vit.layers import VisionLayer
from tests.distributed import harness

TILES, SHARE = 64, 0.5


def layer_of(inputs: TrainingInputs, number: int, share: float = SHARE) -> VisionLayer:
    """ViT layer `number` of four, which scales its branches as trained ones do."""
    model = replace(harness.SMALL, vision=replace(harness.SMALL.vision, drop_path=share))
    layer = harness.build_chain(inputs.args, model).build(1 + number)
    assert isinstance(layer, VisionLayer)
    for branch in (layer.self_attn_bda, layer.mlp_bda):
        branch.scale.data.uniform_(0.5, 2.0)
    return layer


def pack_of(tiles: int) -> harness.Microbatch:
    return harness.Microbatch((1,), 1, 1, media={"tiles": Images(together(tiles))})


def test_shares_grow_from_none_to_the_last_layer_s(inputs: TrainingInputs) -> None:
    shares = [layer_of(inputs, number).drop_path for number in range(4)]
    assert shares == pytest.approx([0.0, SHARE / 3, 2 * SHARE / 3, SHARE])


@pytest.mark.parametrize("seed", [0, 1])
def test_every_tile_goes_one_of_four_ways(inputs: TrainingInputs, seed: int) -> None:
    """With branches scaled by 0 or 1 / (1 - share), worked out by the layer without drop path."""
    torch.manual_seed(seed)
    layer = layer_of(inputs, 3).train()
    tokens = harness.SMALL.vision.tokens_per_tile
    hidden = torch.randn(tokens * TILES, 1, harness.SMALL.vision.hidden_size)
    found = layer(hidden, pack_of(TILES)).view(tokens, TILES, -1)
    ways = {}
    scales = [branch.scale.data.clone() for branch in (layer.self_attn_bda, layer.mlp_bda)]
    layer.eval()
    for way in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for branch, scale, taken in zip((layer.self_attn_bda, layer.mlp_bda), scales, way, strict=True):
            branch.scale.data = scale * taken / (1 - SHARE)
        ways[way] = layer(hidden, pack_of(TILES)).view(tokens, TILES, -1)
    gone = [way for tile in range(TILES) for way, out in ways.items()
            if torch.allclose(found[:, tile], out[:, tile], atol=1e-5)]  # fmt: skip
    assert len(gone) == TILES, "each goes one way"
    assert min(map(gone.count, ways)) >= TILES // 16  # 16 of 64 each, on the average: the branches are drawn apart
    share = sum(map(sum, gone)) / TILES / 2
    assert abs(share - (1 - SHARE)) < 0.2


def test_nothing_is_left_out_in_evaluation(inputs: TrainingInputs) -> None:
    torch.manual_seed(3)
    plain, dropping = layer_of(inputs, 3, 0.0), layer_of(inputs, 3)
    dropping.load_state_dict(plain.state_dict())
    hidden = torch.randn(harness.SMALL.vision.tokens_per_tile * 8, 1, harness.SMALL.vision.hidden_size)
    dropping.train()(hidden, pack_of(8))
    assert torch.equal(dropping.eval()(hidden, pack_of(8)), plain.eval()(hidden, pack_of(8)))
