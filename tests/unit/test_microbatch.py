"""What the tokens of a pack are a multiple of: a whole share for each tensor-parallel rank, in eight bits too."""

from argparse import Namespace

import pytest

from megatron.vlm.microbatch import sequence_multiple


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("fp8", [None, "hybrid"])
def test_every_share_is_whole_and_products_in_eight_bits_take_it(tensor: int, shares: bool, fp8: str | None) -> None:
    multiple = sequence_multiple(Namespace(tensor_model_parallel_size=tensor, sequence_parallel=shares, fp8=fp8))
    ranks = tensor if shares else 1
    assert multiple % ranks == 0
    assert multiple // ranks == (32 if fp8 else 1), "MXFP8's blocks are of 32"
