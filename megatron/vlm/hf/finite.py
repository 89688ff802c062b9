"""Weights that are no finite numbers: refused where a model comes in, warned of where one goes out."""

from pathlib import Path

import torch
from torch import Tensor

from omnibal_ext.errors import UserError
from omnibal_ext.output import say

SHOWN = 3
"""Most names in a message."""


class Broken:
    """Names of the tensors seen so far that hold NaN or infinity."""

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}

    def seen(self, name: str, tensor: Tensor) -> Tensor:
        """Check a tensor, once for each name, and return it. One pass over it, which needs no memory."""
        if name not in self._found:
            self._found[name] = not _is_finite(tensor)
        return tensor

    @property
    def names(self) -> list[str]:
        """Names in the order in which they were seen."""
        return [name for name, is_broken in self._found.items() if is_broken]

    def refuse(self, source: Path) -> None:
        """Raise UserError naming tensors seen that are not finite, if any; `source`: where they are from."""
        if self.names:
            raise UserError(f"{source}: {self}; download it again, or have it written again")

    def warn(self, source: Path) -> None:
        """Print a warning naming tensors seen that are not finite, if any; `source`: where they are from."""
        if self.names:
            say(f"warning: {source}: {self}; written as they are, older saves may be whole", error=True)

    def __str__(self) -> str:
        names = self.names
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{', '.join(names[:SHOWN])}{more}: not all numbers are finite (NaN or infinity)"


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or infinity; a single number may be a bound at infinity, as Gemma's."""
    if not (tensor.numel() and tensor.is_floating_point()):
        return True
    if tensor.numel() == 1:
        return not tensor.isnan().any()
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
