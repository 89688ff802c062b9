"""Random states, and recomputation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
