"""Matrices that clamp: a fused layer gives what its matrices give apart, with torch's gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron.vlm.families.gemma4.clip import Clip

GROUPS, SHARE, WIDTH = 2, 3, 5
INFINITE = [-torch.inf, torch.inf]


def drawn(parts: int, alike: bool, generator: torch.Generator) -> Tensor:
    """Ranges that bite, those of what goes in alike or not."""
    bounds = torch.tensor([-1.0, 1.0, -0.5, 0.5]) * (0.5 + torch.rand(parts, 4, generator=generator))
    if alike:
        bounds[:, :2] = bounds[0, :2].clone()
    return bounds


def fused(clip: Clip, rows: Tensor, weight: Tensor) -> Tensor:
    return clip.leaving(linear(clip.entering(rows), weight))


def apart(ranges: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Every matrix by itself, its numbers among those of the others group by group."""
    found = []
    for part, (low, high, least, most) in enumerate(ranges):
        own = weight.view(GROUPS, len(ranges), SHARE, WIDTH)[:, part].flatten(0, 1)
        out = linear(rows.clamp(low, high), own).clamp(least, most)
        found.append(out.view(len(rows), GROUPS, SHARE))
    return torch.stack(found, dim=2).view(len(rows), 1, -1)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_fused_layer_gives_what_its_matrices_give_apart(parts: int) -> None:
    """Ranges as built, then others read into it: alike, different, infinite; values at a bound have a gradient."""
    generator = torch.Generator().manual_seed(parts)
    rows = torch.randn(7, 1, WIDTH, generator=generator)
    weight = torch.randn(GROUPS * parts * SHARE, WIDTH, generator=generator)
    clip = Clip(parts, SHARE, torch.float32)
    cases = [torch.tensor([INFINITE * 2] * parts), drawn(parts, True, generator), drawn(parts, False, generator)]
    cases += [cases[1], cases[2].clone()]
    cases[-1][:, 2] = -torch.inf
    cases[-1][0, 1] = rows.max()
    for number, ranges in enumerate(cases):
        if number:
            clip.load_state_dict({"ranges": ranges})
        leaves = [[t.clone().requires_grad_() for t in (rows, weight)] for _ in range(2)]
        mine, wanted = fused(clip, *leaves[0]), apart(ranges, *leaves[1])
        assert mine.shape == wanted.shape
        torch.testing.assert_close(mine, wanted)
        weighed = torch.randn(wanted.shape, generator=generator)
        grads = [
            torch.autograd.grad((out * weighed).sum(), found) for out, found in zip((mine, wanted), leaves, strict=True)
        ]
        torch.testing.assert_close(*grads)
    assert not clip.ranges.requires_grad
