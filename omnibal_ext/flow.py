"""What travels from link to link beside the hidden states.

    extra              from                           to                       models
    feature            a tower's layer                its projector            DeepStack (Qwen3-VL), ViP-LLaVA
                       projector                      word embedding           DeepStack
                       word embedding                 a first language layer   DeepStack
    first, norm        word embedding                 every language layer     Gemma 4 E2B
    key, value         a language layer               some behind it           Gemma 4 E2B

Each is on its way behind the link that gives it, up to the last that takes it. From this alone follows what a stage
receives (`megatron.vlm.models.flow`) and what the planner counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from omnibal_ext.architectures.language import LanguageArchitecture


@dataclass(frozen=True)
class Extra:
    """A tensor that one link of a chain gives and others take."""

    name: str
    giver: int
    takers: tuple[int, ...]
    """Links, ascending."""
    shape: tuple[int, ...] = ()
    """Of one row; (): the whole is shaped as the hidden states are."""
    rows: int = 1
    """How many it has for each row of the hidden states; 0: it is one row, however many these are."""
    of_tower: bool = False
    """Only packs that the tower encodes something of have it."""
    added: bool = False
    """It is added to what its taker gives; the taker's module does not read it."""

    def enters(self, link: int) -> bool:
        """Whether it is on its way in front of a link."""
        return self.giver < link <= self.takers[-1]

    def of(self, rows: int, width: int) -> tuple[int, ...]:
        """Its shape beside hidden states [rows, 1, width]."""
        if not self.shape:
            return (rows, 1, width)
        return (rows * self.rows, *self.shape) if self.rows else self.shape


def tower_extras(chain: Sequence[str], layers: Sequence[int], joined: bool) -> Iterator[Extra]:
    """The outputs of the ViT layers `layers` (numbers among the ViT's, ascending): they enter one by one behind the
    first language layers (DeepStack, arXiv 2406.04334), or, `joined`, the projector all at once."""
    vision, language = (_links(chain, kind) for kind in ("vit", "llm"))
    for number, layer in enumerate(layers):
        stops = [vision[layer], chain.index("projector")]
        stops += [] if joined else [chain.index("word_embed"), language[number]]
        for giver, taker in pairwise(stops):
            yield Extra(f"feature {number}", giver, (taker,), of_tower=True, added=chain[taker] == "llm")


def language_extras(
    chain: Sequence[str], language: LanguageArchitecture, ranks: int, is_shared_out: bool
) -> Iterator[Extra]:
    """What language layers read of the word embedding and of each other, on one of so many tensor-parallel `ranks`, of
    which each holds its part of the hidden states, or all of them."""
    layers, words = _links(chain, "llm"), chain.index("word_embed")
    if inputs := language.layer_inputs:
        yield Extra("first", words, layers)
        yield Extra("norm", words, layers, (inputs.width,), rows=0)
    for giver, layer in enumerate(language.each_layer):
        takers = [link for link, other in zip(layers, language.each_layer, strict=True) if other.keys_from == giver]
        if takers and layer.attention:
            shape = (1, layer.attention.groups_on(ranks), layer.attention.head_dim)
            for name in (f"key {giver}", f"value {giver}"):
                yield Extra(name, layers[giver], tuple(takers), shape, ranks if is_shared_out else 1)


def blocks(extras: Iterable[Extra], width: int) -> int:
    """Tensors as large as the hidden states, of `width` numbers a row, that extras take; those with shapes of their own
    fill up the last one. Those of one row are not counted."""
    row = [prod(extra.of(1, width)) for extra in extras if extra.rows]
    return -(-sum(row) // width)


def blocks_after(extras: Iterable[Extra], links: int, width: int) -> tuple[int, ...]:
    """The same behind every link of a chain."""
    extras = tuple(extras)
    return tuple(blocks([extra for extra in extras if extra.enters(link + 1)], width) for link in range(links))


def features_after(chain: Sequence[str], layers: Sequence[int], joined: bool = False) -> tuple[int, ...]:
    """How many features of a tower travel beside the output of every link."""
    return blocks_after(tower_extras(chain, layers, joined), len(chain), 1)


def _links(chain: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(link for link, one in enumerate(chain) if one == kind)
