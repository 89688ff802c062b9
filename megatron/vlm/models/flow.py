"""Tensors that go from layer to layer: hidden states, and extras by name (`omnibal_ext.flow`).

    between stages    hidden states | extras of the same shape | other extras end to end, padded to whole rows

A layer's module takes the extras that the layer reads as arguments, and returns `(hidden, *extras)` with those it
makes. If it returns hidden states alone, these are also the extras that the layer makes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from omnibal_ext.flow import Extra, blocks
from omnibal_ext.modalities.modality import Modality


@dataclass
class Flow:
    """Hidden states, and other tensors that later layers need (extras, by name), of one pack between two layers."""

    hidden: Tensor | None
    """[rows here, 1, width]; None: in front of the first layer."""
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Carrier:
    """The layout of a pack's extras: which layer makes and reads each, and where they are in a stage's tensor."""

    extras: tuple[Extra, ...]
    """Extras of the pack's chain, with their shapes on one tensor-parallel rank."""

    def at(self, tokens: Mapping[Modality, int]) -> "Carrier":
        """Return the carrier with the shapes that extras have in a pack of so many tokens of each modality."""
        return Carrier(tuple(one.at(tokens) for one in self.extras))

    def rows(self, layer: int, rows: int, width: int) -> int:
        """Count the rows of the tensor that enters `layer`, with extras, for so many rows of hidden states."""
        found = self._entering(layer)
        return rows * (1 + blocks(found, width)) + _rows_apart(found, width)

    def through(self, layer: int, flow: Flow, step: Callable[..., Any]) -> Flow:
        """Return the flow after a layer; `step` runs its module on hidden states and the extras that it reads.

        Extras that are `added` are added to its output; a module that returns one tensor gives it as its extras too.
        """
        taken = [(one, flow.extras[one.name]) for one in self.extras if layer in one.takers]
        made = [one for one in self.extras if one.giver == layer]
        out = step(flow.hidden, *(tensor for one, tensor in taken if not one.added))
        hidden, *given = out if isinstance(out, tuple) else (out, *[out] * len(made))
        given = [flow.hidden if one.passing else tensor for one, tensor in zip(made, given, strict=True)]
        for one, tensor in taken:
            hidden = hidden + tensor if one.added else hidden
        passing = {one.name: flow.extras[one.name] for one in self._entering(layer + 1) if one.giver < layer}
        return Flow(hidden, passing | {one.name: tensor for one, tensor in zip(made, given, strict=True)})

    def joined(self, layer: int, flow: Flow) -> Tensor:
        """Concatenate the hidden states and extras that enter a layer to one tensor."""
        assert flow.hidden is not None
        if not (found := self._entering(layer)):
            return flow.hidden
        rows, _, width = flow.hidden.shape
        parts = [flow.hidden, *(flow.extras[one.name] for one in found if not one.shape)]
        if others := [flow.extras[one.name].flatten() for one in found if one.shape]:
            room = (self.rows(layer, rows, width) - rows * len(parts)) * width
            filler = others[0].new_zeros(room - sum(map(len, others)))
            parts.append(torch.cat([*others, filler]).view(-1, 1, width))
        return torch.cat(parts)

    def split(self, layer: int, tensor: Tensor | None) -> Flow:
        """Split the tensor that `joined` makes into the flow before a layer; `None` enters the first layer."""
        found = self._entering(layer)
        if tensor is None or not found:
            return Flow(tensor)
        width = tensor.shape[-1]
        rows = (len(tensor) - _rows_apart(found, width)) // (1 + blocks(found, width))
        shapes = [(rows, 1, width), *(one.shape_of(rows, width) for one in found)]
        sizes = [prod(shape) for shape in shapes]
        filler = tensor.numel() - sum(sizes)
        parts = tensor.flatten().split([*sizes, filler] if filler else sizes)
        hidden, *extras = (part.view(shape) for part, shape in zip(parts, shapes, strict=False))
        return Flow(hidden, dict(zip((one.name for one in found), extras, strict=True)))

    def _entering(self, layer: int) -> list[Extra]:
        """List the extras that enter a layer, in the order in which they are laid out."""
        found = (one for one in self.extras if one.enters(layer))
        return sorted(found, key=lambda one: (bool(one.shape), not one.rows))  # kernels want aligned heads


def _rows_apart(extras: list[Extra], width: int) -> int:
    """Count the rows that extras without rows of their own fill in the tensor between stages."""
    return -(-sum(prod(one.shape) for one in extras if not one.rows) // width)
