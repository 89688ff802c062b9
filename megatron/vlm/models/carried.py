"""What travels beside the hidden states of a language model whose layers read more than these (Gemma 4 E2B).

    rows of what a stage receives    hidden states | first hidden states | keys and values, filled up | norm's weight

Each part but the last is as many rows as the hidden states, or several times as many. Keys and values are those of
layers in front of the cut that layers behind it take, as they leave their norms. The weight is that of a norm which all
layers' inputs have in common: it is the word embedding's, and its gradient comes back with theirs.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from omnibal_ext.architectures.architecture import Architecture

Keys = tuple[Tensor, Tensor]
"""Key and value [T, 1, groups here, width of a head], not yet turned."""


@dataclass
class Carried:
    """Of one pack, between two links. What is not there is None, or empty."""

    first: Tensor | None = None
    """[rows here, 1, width]"""
    weight: Tensor | None = None
    """[width of a layer's input]"""
    keys: dict[int, Keys] = field(default_factory=dict)
    """By the layer that gave them."""


@dataclass(frozen=True)
class Carrier:
    """Hands it from link to link, and lays it out between stages. What crosses where is found once for all packs."""

    architecture: Architecture
    config: TransformerConfig
    """The language model's."""

    def extra_rows(self, link: int, rows: int) -> int:
        """Rows that enter `link` behind hidden states of so many."""
        return self._blocks[link] * rows + self._weight_rows(link)

    def arrived(self, link: int, rows: int, tensor: Tensor) -> Carried:
        """What those rows are."""
        carried, blocks = Carried(), self._blocks[link]
        if blocks and self.architecture.language.layer_inputs is not None:
            carried.first, tensor, blocks = tensor[:rows], tensor[rows:], blocks - 1
            carried.weight = tensor[blocks * rows :].flatten()[: self.architecture.language.layer_inputs.width]
        keys = tensor[: blocks * rows].reshape(rows, -1) if blocks else tensor
        for giver in self._givers[link]:
            groups, width = self._heads(giver)
            numbers = 2 * groups * width * self._shares
            key, value = keys[:, :numbers].reshape(2, rows * self._shares, 1, groups, width)
            carried.keys[giver], keys = (key, value), keys[:, numbers:]
        return carried

    def read_by(self, link: int, carried: Carried) -> tuple[Tensor, ...]:
        """What a link takes beside the hidden states: the first ones and the weight, key and value."""
        if link not in self._numbers:
            return ()
        inputs = () if carried.first is None or carried.weight is None else (carried.first, carried.weight)
        return inputs + (carried.keys[self._taken[link]] if link in self._taken else ())

    def given_by(self, link: int, module: Any, out: Any, carried: Carried) -> Tensor:
        """Hidden states, of what a link gave; what later ones read of it is carried on."""
        hidden, *keys = out if isinstance(out, tuple) else (out,)
        if keys:
            key, value = keys
            carried.keys[self._numbers[link]] = key, value
        if self.architecture.chain[link] == "word_embed" and (weight := module.weight_of_inputs()) is not None:
            carried.first, carried.weight = hidden, weight
        return hidden

    def leaving(self, link: int, hidden: Tensor, carried: Carried) -> list[Tensor]:
        """What enters `link` behind the hidden states, in parts."""
        found = list[Tensor]()
        if not (blocks := self._blocks[link]):
            return found
        rows, _, width = hidden.shape
        if carried.first is not None:
            found.append(carried.first)
        if givers := self._givers[link]:
            keys = torch.cat([torch.stack(carried.keys[giver]).reshape(rows, -1) for giver in givers], dim=1)
            filled = (blocks - len(found)) * width
            found.append(pad(keys, (0, filled - keys.shape[1])).view(-1, 1, width))
        if carried.weight is not None:
            filled = self._weight_rows(link) * width
            found.append(pad(carried.weight, (0, filled - len(carried.weight))).view(-1, 1, width))
        return found

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        """Tensors as large as the hidden states that enter every link beside them, and leave the last one."""
        config, model = self.config, self.architecture
        behind = model.carried_after(config.tensor_model_parallel_size, config.sequence_parallel)
        return (0, *(behind or (0,) * len(model.chain)))

    @cached_property
    def _givers(self) -> tuple[tuple[int, ...], ...]:
        """Layers whose keys and values are among these."""
        chain, language = self.architecture.chain, self.architecture.language
        before = [chain[:link].count("llm") - 1 for link in range(len(chain) + 1)]
        return tuple(
            language.kept_keys(number) if blocks else () for number, blocks in zip(before, self._blocks, strict=True)
        )

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Of the language layers, by their links."""
        links = (link for link, kind in enumerate(self.architecture.chain) if kind == "llm")
        return {link: number for number, link in enumerate(links)}

    @cached_property
    def _taken(self) -> dict[int, int]:
        """By the links of layers that take keys and values, the layer that gave them."""
        language = self.architecture.language
        givers = {link: language.each_layer[number].keys_from for link, number in self._numbers.items()}
        return {link: giver for link, giver in givers.items() if giver is not None}

    def _weight_rows(self, link: int) -> int:
        inputs = self.architecture.language.layer_inputs
        return -(-inputs.width // self.config.hidden_size) if inputs is not None and self._blocks[link] else 0

    @property
    def _shares(self) -> int:
        """Tensor-parallel ranks that share the rows of hidden states."""
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    def _heads(self, giver: int) -> tuple[int, int]:
        """Groups of keys and values that a rank has of a layer, and the width of a head."""
        attention = self.architecture.language.each_layer[giver].attention
        assert attention is not None
        return attention.groups_on(self.config.tensor_model_parallel_size), attention.head_dim
