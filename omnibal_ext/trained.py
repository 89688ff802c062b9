"""What of a model is trained: all but some frozen parts, or adapters alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnibal_ext.chain import GradientMode, gradient_mode


@dataclass(frozen=True)
class Trained:
    """What of a model is trained: all but frozen parts, or adapters alone. Field names are those of files."""

    frozen: tuple[str, ...] = ()
    """Parts of the model (`omnibal_ext.chain.PARTS`) with frozen weights."""
    lora_rank: int = 0
    """Rank of the adapters; 0: none."""
    lora_targets: tuple[str, ...] = ()
    """The parts that have adapters."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Trained":
        """Return what is trained as a record says it, which may have other fields too."""
        frozen, targets = (tuple(record.get(name, ())) for name in ("frozen", "lora_targets"))
        return cls(frozen, record.get("lora_rank", 0), targets)

    def to_record(self) -> dict[str, Any]:
        """Return what is trained (frozen parts, adapters) as the fields of a file."""
        return {"frozen": list(self.frozen), "lora_rank": self.lora_rank, "lora_targets": list(self.lora_targets)}

    def mode(self, kind: str) -> GradientMode:
        """Return which gradients a backward computes in layers with this cost key, "trained" or the like."""
        return gradient_mode(kind, self.frozen, self.lora_targets)


ALL = Trained()
"""Value for training all weights."""
