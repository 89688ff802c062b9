"""What `--check` says of two models' logits."""

import math

import pytest
import torch

from megatron.vlm.hf.check import largest


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_logit_that_is_no_number_is_the_difference(place: int) -> None:
    """Wherever it is: Python's `max` keeps what comes first."""
    differences = [torch.zeros(2, 3), torch.ones(4, 3), torch.full((1, 3), 0.5)]
    assert largest(differences) == 1
    differences[place][-1, -1] = math.nan
    assert math.isnan(largest(differences))
