"""Extras: tensors that layers of the chain pass on in addition to the hidden states.

    extra              from                           to                       models
    feature            a tower's layer                its projector            DeepStack (Qwen3-VL), ViP-LLaVA
                       projector                      word embedding           DeepStack
                       word embedding                 a first language layer   DeepStack
    first, norm        word embedding                 every language layer     Gemma 4 E2B
    key, value         a language layer               some later ones          Gemma 4 E2B
    tokens             an encoder's embedding, which  word embedding           models with several encoders
                       gets them as hidden states
    rows, tokens       the same; the projector        a projector; word        two encoders before one projector
                                                      embedding

Each is passed on from the layer that makes it to the last that uses it. This determines what a stage receives
(`megatron.vlm.models.flow`) and what the planner counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TypeVar

from omnibal_ext.modalities.encoder import Features
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.modality import ENCODED, LANGUAGE, Modality

One = TypeVar("One")


@dataclass(frozen=True)
class Extra:
    """Tensor that one layer of a chain (`giver`) makes and others (`takers`) use."""

    name: str
    giver: int
    takers: tuple[int, ...]
    """Layers that use it, ascending."""
    shape: tuple[int, ...] = ()
    """Shape of one row; (): the tensor has the shape of the hidden states."""
    rows: int = 1
    """Rows of it per row of the hidden states; 0: one row in total."""
    of: Modality | None = None
    """Packs without inputs of this modality do not have it; None: every pack has it."""
    added: bool = False
    """Whether it is added to its taker's output, not read by the taker's module."""
    passing: Modality | None = None
    """Modality whose last layer gives it: the hidden states that enter its giver, as many as `at` sets."""
    projected: Modality | None = None
    """Modality of whose rows its giver makes these tokens, as many as `at` sets."""

    @property
    def counted(self) -> Modality | None:
        """Modality whose tokens or rows these are, if their number depends on the pack; else None."""
        return self.passing or self.projected

    def at(self, tokens: Mapping[Modality, int]) -> "Extra":
        """Return the extra with its shape in a pack of so many tokens of each modality; only if `counted` does it
        depend on them."""
        return replace(self, shape=(tokens[self.counted], *self.shape)) if self.counted else self

    def enters(self, layer: int) -> bool:
        """Say whether this extra is passed to a layer, or through it."""
        return self.giver < layer <= self.takers[-1]

    def shape_of(self, rows: int, width: int) -> tuple[int, ...]:
        """Return this extra's shape for hidden states [rows, 1, width]."""
        if not self.shape:
            return (rows, 1, width)
        return (rows * self.rows, *self.shape) if self.rows else self.shape


def encoder_extras(
    chain: Sequence[str], encoders: Mapping[Modality, Features], width: int, row_width: int = 1
) -> Iterator[Extra]:
    """Yield the extras that `encoders` give to layers of `chain`, which may lack the model's first layers. `width`: of
    the language model's hidden states; `row_width`: of rows that another encoder's projector projects.

    Tokens of an encoder pass by the encoders behind it, to the word embedding. If another encoder's projector makes
    them, its rows pass by as far as that projector, and its tokens from there on. The giver is -1 where the chain
    begins behind the layer that gets them as hidden states. Features go from layers to the projector and, unless it
    joins them, to the first language layers.
    """
    words = chain.index(LANGUAGE.kinds[0])
    for before, behind in pairwise(one for one in ENCODED if one in encoders):
        giver = chain.index(behind.kinds[0]) if behind.kinds[0] in chain else -1
        if (by := before.projected_by) and by.kinds[2] in chain:
            projector, shape = chain.index(by.kinds[2]), (1, row_width)
            yield Extra(f"{before.name} rows", giver, (projector,), shape, rows=0, passing=before)
            yield Extra(f"{before.name} tokens", projector, (words,), (1, width), rows=0, projected=before)
        elif giver >= 0 or words > 0:
            yield Extra(f"{before.name} tokens", giver, (words,), (1, width), rows=0, passing=before)
    for modality in ENCODED:
        if modality in encoders and modality.kinds[0] in chain:
            yield from _features(chain, modality, encoders[modality])


def in_rows(encoders: Sequence[One]) -> tuple[One, ...]:
    """Return encoders (in the order of the chain) in the order of their tokens in the tensor sent between stages: the
    last one, whose tokens are the hidden states, then those that `encoder_extras` pass on."""
    return (*encoders[-1:], *encoders[:-1])


def _features(chain: Sequence[str], modality: Modality, features: Features) -> Iterator[Extra]:
    name, (_, layer_kind, projector) = modality.name, modality.kinds
    layers, language = _layers_of(chain, layer_kind), _layers_of(chain, LANGUAGE.kinds[1])
    for number, layer in enumerate(features.layers):
        stops = [layers[layer], chain.index(projector)]
        stops += [] if features.joined else [chain.index(LANGUAGE.kinds[0]), language[number]]
        for giver, taker in pairwise(stops):
            yield Extra(f"{name} feature {number}", giver, (taker,), of=modality, added=taker in language)


def language_extras(
    chain: Sequence[str], language: LanguageArchitecture, ranks: int, is_shared_out: bool
) -> Iterator[Extra]:
    """Yield the tensors that language layers take from the word embedding and from each other, on one of `ranks`
    tensor-parallel ranks. `is_shared_out`: hidden states are sharded over these (sequence parallelism)."""
    layers, words = _layers_of(chain, "llm"), chain.index("word_embed")
    if inputs := language.layer_inputs:
        yield Extra("first", words, layers)
        yield Extra("norm", words, layers, (inputs.width,), rows=0)
    for giver, layer in enumerate(language.each_layer):
        takers = [taker for taker, other in zip(layers, language.each_layer, strict=True) if other.keys_from == giver]
        if takers and layer.attention:
            shape = (1, layer.attention.groups_on(ranks), layer.attention.head_dim)
            for name in (f"key {giver}", f"value {giver}"):
                yield Extra(name, layers[giver], tuple(takers), shape, ranks if is_shared_out else 1)


def blocks(extras: Iterable[Extra], width: int) -> int:
    """Return the size of extras in multiples of the hidden states (`width` numbers a row), rounded up; without those
    that have a single row in total."""
    row = [prod(extra.shape_of(1, width)) for extra in extras if extra.rows]
    return -(-sum(row) // width)


def blocks_after(extras: Iterable[Extra], layers: int, width: int) -> tuple[int, ...]:
    """Return the size (`blocks`) of the extras passed on with the output of every layer of a chain."""
    extras = tuple(extras)
    return tuple(blocks([extra for extra in extras if extra.enters(layer + 1)], width) for layer in range(layers))


def features_after(chain: Sequence[str], encoders: Mapping[Modality, Features]) -> tuple[int, ...]:
    """Return the number of features (outputs of encoder layers) passed on with the output of every layer."""
    return blocks_after([one for one in encoder_extras(chain, encoders, 1) if one.of], len(chain), 1)


def _layers_of(chain: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, one in enumerate(chain) if one == kind)
