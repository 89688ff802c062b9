"""Extras: tensors that links of the chain pass on in addition to the hidden states.

    extra              from                           to                       models
    feature            a tower's layer                its projector            DeepStack (Qwen3-VL), ViP-LLaVA
                       projector                      word embedding           DeepStack
                       word embedding                 a first language layer   DeepStack
    first, norm        word embedding                 every language layer     Gemma 4 E2B
    key, value         a language layer               some later ones          Gemma 4 E2B
    sounds             patch embedding, which         word embedding           models that hear
                       gets them as hidden states

Each is passed on from the link that makes it to the last that uses it. This determines what a stage receives
(`megatron.vlm.models.flow`) and what the planner counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from omnibal_ext.architectures.language import LanguageArchitecture


@dataclass(frozen=True)
class Extra:
    """A tensor that one link of a chain (`giver`) makes and others (`takers`) use."""

    name: str
    giver: int
    takers: tuple[int, ...]
    """Links, ascending."""
    shape: tuple[int, ...] = ()
    """Shape of one row; (): the tensor has the shape of the hidden states."""
    rows: int = 1
    """Its rows per row of the hidden states; 0: one row in total."""
    of_tower: bool = False
    """Only packs with images have it."""
    added: bool = False
    """It is added to its taker's output, not read by the taker's module."""
    heard: bool = False
    """It is the hidden states that enter its giver: the pack's audio tokens, whose number `at` sets."""

    def at(self, audio_tokens: int) -> "Extra":
        """Return the extra in a pack with so many audio tokens; only one that is `heard` depends on them."""
        return replace(self, shape=(audio_tokens, *self.shape)) if self.heard else self

    def enters(self, link: int) -> bool:
        """Whether it is passed to a link, or through it."""
        return self.giver < link <= self.takers[-1]

    def of(self, rows: int, width: int) -> tuple[int, ...]:
        """Return its shape for hidden states [rows, 1, width]."""
        if not self.shape:
            return (rows, 1, width)
        return (rows * self.rows, *self.shape) if self.rows else self.shape


def tower_extras(chain: Sequence[str], layers: Sequence[int], joined: bool) -> Iterator[Extra]:
    """Yield features, the outputs of the ViT layers `layers` (ascending): the n-th is added after the n-th language
    layer (DeepStack, arXiv 2406.04334), or with `joined` all enter the projector."""
    vision, language = (_links(chain, kind) for kind in ("vit", "llm"))
    for number, layer in enumerate(layers):
        stops = [vision[layer], chain.index("projector")]
        stops += [] if joined else [chain.index("word_embed"), language[number]]
        for giver, taker in pairwise(stops):
            yield Extra(f"feature {number}", giver, (taker,), of_tower=True, added=chain[taker] == "llm")


def audio_extras(chain: Sequence[str], width: int, hears: bool) -> Iterator[Extra]:
    """Yield the audio tokens, `width` wide, that pass by the vision tower if the model hears."""
    if hears and "patch_embed" in chain:
        yield Extra("sounds", chain.index("patch_embed"), (chain.index("word_embed"),), (1, width), rows=0, heard=True)


def language_extras(
    chain: Sequence[str], language: LanguageArchitecture, ranks: int, is_shared_out: bool
) -> Iterator[Extra]:
    """Yield what language layers use from the word embedding and from each other, on one of `ranks` tensor-parallel
    ranks. `is_shared_out`: hidden states are sharded over these (sequence parallelism)."""
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
    """Return the size of extras in multiples of the hidden states (`width` numbers a row), rounded up. Those of one row
    are not counted."""
    row = [prod(extra.of(1, width)) for extra in extras if extra.rows]
    return -(-sum(row) // width)


def blocks_after(extras: Iterable[Extra], links: int, width: int) -> tuple[int, ...]:
    """Return `blocks` of the extras passed on after every link of a chain."""
    extras = tuple(extras)
    return tuple(blocks([extra for extra in extras if extra.enters(link + 1)], width) for link in range(links))


def features_after(chain: Sequence[str], layers: Sequence[int], joined: bool = False) -> tuple[int, ...]:
    """Return the number of a tower's features passed on with the output of every link."""
    return blocks_after(tower_extras(chain, layers, joined), len(chain), 1)


def _links(chain: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(link for link, one in enumerate(chain) if one == kind)
