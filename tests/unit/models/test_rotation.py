"""Query and key turn as complex numbers do: pairs of a head's first and second half, by the angles of their rows."""

import pytest
import torch

from megatron.vlm.models.attention.rotation import rotation, turned


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("still", [0, 5])
def test_pairs_turn_by_their_angles(seed: int, factor: float, still: int) -> None:
    """The last `still` numbers of a head do not."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 11, 6
    query, key = (torch.randn(rows, 1, heads, 2 * width + still, generator=generator).double() for heads in (4, 2))
    angles = (100 * torch.rand(rows, 1, 1, width, generator=generator)).double()
    ours = turned(query, key, *rotation(torch.cat([angles, angles], dim=-1), torch.float64, factor))
    for before, after in zip((query, key), ours, strict=True):
        turning, others = before.split([2 * width, still], dim=-1)
        numbers = torch.complex(*turning.chunk(2, dim=-1)) * torch.polar(torch.full_like(angles, factor), angles)
        assert torch.allclose(after, torch.cat([numbers.real, numbers.imag, others], dim=-1), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_is_taken_in_fp32_and_applied_in_the_precision_of_what_turns(dtype: torch.dtype) -> None:
    """As transformers does: angles of thousands of radians are wrong altogether in half precision."""
    angles = torch.arange(5000, dtype=torch.float32).view(-1, 1, 1, 1)
    cosines, sines, _ = rotation(angles, dtype)
    assert torch.equal(cosines, angles.double().cos().to(dtype)) or dtype == torch.float32
    assert torch.allclose(sines.double(), angles.double().sin(), atol=1e-6 if dtype == torch.float32 else 4e-3)
