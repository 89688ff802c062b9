"""Sizes of samples as processors make them, and packs as one sequence."""

import pytest
import torch

from omnibal_ext.integrations.samples import Packer, join, size_of
from tests.unit.integrations.peers import check, drawn, sample


@pytest.mark.parametrize(
    ("shapes", "tiles"),
    [
        ({}, 0), ({"pixel_values": (7, 3, 4, 4)}, 7), ({"pixel_values": (2, 5, 3, 4, 4)}, 10),
        ({"pixel_values": (64, 588), "pixel_values_videos": (32, 588)}, 96),
    ],
)  # fmt: skip
def test_tiles_or_patches_and_tokens_of_a_sample(shapes: dict[str, tuple[int, ...]], tiles: int) -> None:
    pixels = {key: torch.zeros(shape) for key, shape in shapes.items()}
    for ids in (torch.zeros(9), torch.zeros(1, 9), [0] * 9):
        assert size_of({"input_ids": ids, **pixels, "other": None}) == (tiles, 9)


def test_a_pack_is_its_samples_one_after_the_other_with_no_padding() -> None:
    pack = join([sample(4, 2, 3), sample(5, 0, 2), sample(6, 1, 4)])
    assert pack["input_ids"].tolist() == [4, 4, 4, 5, 5, 6, 6, 6, 6]
    assert pack["labels"].tolist() == [-100, 4, 4, -100, 5, -100, 6, 6, 6]
    assert pack["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert pack["pixel_values"][:, 0, 0, 0].tolist() == [4, 4, 6]
    assert pack["cu_seqlens"].tolist() == [0, 3, 5, 9]
    assert (pack["cu_seqlens"].dtype, pack["max_seqlen"]) == (torch.int32, 4)


def test_samples_are_not_changed_and_positions_of_several_rows_are_joined_along_tokens() -> None:
    one, other = ({**sample(n, 0, 3 + n), "position_ids": torch.full((3, 1, 3 + n), n)} for n in (0, 1))
    assert join([one, other])["position_ids"].shape == (3, 1, 7)
    assert one["labels"].tolist() == [0, 0, 0]


def test_the_emptiest_pack_waits_for_the_samples_that_come_next() -> None:
    tiles, tokens = drawn(300)
    packs, rest = Packer(12, 300).groups_and_rest(range(300), lambda n: (int(tiles[n]), int(tokens[n])))
    check([*packs, rest], tiles, tokens, (12, 300))
    assert tokens[rest].sum() <= min(tokens[pack].sum() for pack in packs)
    assert Packer(12, 300).groups_and_rest([], size_of) == ([], [])
