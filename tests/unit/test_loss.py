"""What a token weighs, against closed forms in numpy: by hand, sample by sample, none of our code in them."""

from argparse import ArgumentParser

import numpy as np
import pytest
import torch

from megatron.vlm.arguments import add_vlm_arguments
from megatron.vlm.loss import REDUCTIONS, token_loss
from megatron.vlm.microbatch import Microbatch, segment_ids

SAMPLES = [
    # losses, and which of them count
    ([0.5, 1.5, 2.5, 3.5, 4.5], [0, 1, 1, 1, 1]),
    ([7.0], [1]),
    ([2.0, 6.0], [0, 0]),  # nothing counts
    ([1.0, 3.0, 0.25], [1, 0, 1]),
]


def pack(samples: list[tuple[list[float], list[int]]]) -> tuple[Microbatch, torch.Tensor]:
    lengths = tuple(len(losses) for losses, _ in samples)
    mask = torch.tensor([counts for _, mask in samples for counts in mask], dtype=torch.float32)
    losses = torch.tensor([loss for losses, _ in samples for loss in losses], requires_grad=True)
    batch = Microbatch(lengths, len(samples), sum(lengths), loss_mask=mask, segment_ids=segment_ids(lengths))
    return batch, losses


def closed_form(reduction: str, samples: list[tuple[list[float], list[int]]]) -> tuple[float, float, list[float]]:
    """Weighted sum, sum of the weights, and the weight of every token."""
    total, normaliser, weights = 0.0, 0.0, []
    for losses, mask in samples:
        n = sum(mask)
        # token: 1. sample: the sample's tokens weigh 1 together. square: they weigh sqrt(n) together.
        each = {"token": 1.0, "sample": 1.0 / n, "square": np.sqrt(n) / n}[reduction] if n else 0.0
        weights += [each * counts for counts in mask]
        total += each * float(np.dot(losses, mask))
        normaliser += each * n
    return total, normaliser, weights


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1,), (2,)])
def test_sum_normaliser_and_gradient_are_the_closed_form(reduction: str, order: tuple[int, ...]) -> None:
    samples = [SAMPLES[number] for number in order]
    batch, losses = pack(samples)
    total, normaliser, record = token_loss(reduction, batch, losses)
    wanted_total, wanted_normaliser, weights = closed_form(reduction, samples)
    for found in ([total.item(), normaliser.item()], record["lm loss"].tolist()):
        assert found == pytest.approx([wanted_total, wanted_normaliser], rel=1e-6)
    assert not record["lm loss"].requires_grad
    (gradient,) = torch.autograd.grad(total, losses)
    assert gradient.tolist() == pytest.approx(weights, rel=1e-6)


def test_the_flag_offers_the_reductions_that_there_are() -> None:
    parser = add_vlm_arguments(ArgumentParser())
    (flag,) = (action for action in parser._actions if "--loss-reduction" in action.option_strings)
    assert (set(flag.choices), flag.default) == (set(REDUCTIONS), "token")
