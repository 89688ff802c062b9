"""Whether linear layers multiply in eight bits, and how."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class FP8GlobalStateManager:
    """The state of the contexts that are open."""

    FP8_ENABLED = False
    FP8_RECIPE: Any = None
    ENTERED = 0
    """Contexts that were opened with FP8, for tests."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.FP8_RECIPE

    @classmethod
    def reset(cls) -> None:
        cls.FP8_ENABLED, cls.FP8_RECIPE = False, None


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> Iterator[None]:
    state, before = FP8GlobalStateManager, (FP8GlobalStateManager.FP8_ENABLED, FP8GlobalStateManager.FP8_RECIPE)
    state.FP8_ENABLED, state.FP8_RECIPE = enabled, fp8_recipe
    state.ENTERED += enabled
    try:
        yield
    finally:
        state.FP8_ENABLED, state.FP8_RECIPE = before


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    yield


def in_eight_bits(tensor: Tensor) -> Tensor:
    """Rounded to e4m3 by a scale of its own, where a context asks for it; TE's refusal of odd shapes included."""
    if not FP8GlobalStateManager.FP8_ENABLED:
        return tensor
    rows, columns = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
    assert (rows % 8, columns % 16) == (0, 0), (
        "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last "
        f"dimension to be divisible by 16, but got tensor with dims={list(tensor.shape)}"
    )
    scale = tensor.abs().amax().float().clamp(min=1e-12) / 448
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)
