"""How numbers are scaled to eight bits."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Format(Enum):
    """Of the forward and the backward pass."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    """What all have in common."""

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)


class DelayedScaling(Recipe):
    """Scales from the largest numbers of passes before."""

    def __init__(
        self, margin: int = 0, fp8_format: Format = Format.HYBRID, amax_history_len: int = 1024,
        amax_compute_algo: str = "max", scaling_factor_compute_algo: Any = None,
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
        reduce_amax: bool = True, fp8_dpa: bool = False, fp8_mha: bool = False, **ignored: Any,
    ) -> None:  # fmt: skip
        self.fp8_format = fp8_format


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales from the largest number of the tensor itself."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling(Recipe):
    """One scale for 32 numbers."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """One scale a block of 128."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
