"""Random states, and recomputation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    """Named states of the device's generator."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    yield


def get_all_rng_states() -> dict[str, Any]:
    return {}


def checkpoint(
    function: Callable[..., Any], *args: Any, distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None, tp_group: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Keep nothing of what the function computes, and compute it again, in eight bits if it was."""
    eight_bits, recipe = FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.get_fp8_recipe()

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), fp8_autocast(enabled=eight_bits, fp8_recipe=recipe)

    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
