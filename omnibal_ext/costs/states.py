"""Bytes that a trained weight takes on a device, by Megatron's flags of precision.

fp32                            4 + 4 the gradient + 8 the moments
--bf16, --fp16                  2 + 4 + 4 the weight in fp32 + 8
--use-precision-aware-optimizer 2 + 4 or 2 (--main-grads-dtype) + 2 + each moment as its flag says. Transformer
                                Engine keeps, of a weight in fp32, the half that the one in bf16 lacks
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of a number by its type."""
DTYPES = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": tuple(SIZES),
    "exp_avg_sq_dtype": tuple(SIZES),
}
"""Flags of the precision-aware optimizer that take a precision, and which."""
AWARE = "use_precision_aware_optimizer"


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of one weight that is trained: itself, its gradient, and what the optimizer keeps."""

    weight: float = 2
    gradient: float = 4
    state: float = 12
    """What the optimizer keeps; the distributed optimizer shards it over replicas."""

    @staticmethod
    def of(flags: Any, half: bool = True) -> "WeightBytes":
        """Return a weight's bytes by Megatron's flags (precisions as names or torch's); `half`: in bf16 or fp16."""
        if not half:
            return WeightBytes(4, 4, 8)
        if not getattr(flags, AWARE):
            return WeightBytes()
        gradient, _, *moments = (_size(getattr(flags, name)) for name in DTYPES)
        return WeightBytes(2, gradient, 2 + sum(moments))

    def on_a_rank(self, replicas: float = 1) -> float:
        """Return the bytes of one weight on one of `replicas` ranks that share its optimizer state."""
        return self.weight + self.gradient + self.state / replicas


def _size(precision: Any) -> int:
    return SIZES[precision] if isinstance(precision, str) else int(precision.itemsize)


def add_state_flags(add: Callable[..., Any]) -> None:
    """Add Megatron's flags of the precision-aware optimizer to a parser, given its `add_argument`."""
    add("--use-precision-aware-optimizer", action="store_true", help="Transformer Engine keeps narrower states")
    for name, precisions in DTYPES.items():
        add(f"--{name.replace('_', '-')}", choices=precisions, default="fp32", help="of these states")


def state_words(flags: Any) -> list[str]:
    """Return the command line's words for these flags; none without a precision-aware optimizer."""
    if not getattr(flags, AWARE):
        return []
    words = [(f"--{name.replace('_', '-')}", str(getattr(flags, name))) for name in DTYPES]
    return ["--use-precision-aware-optimizer", *(word for pair in words for word in pair)]
