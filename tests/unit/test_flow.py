"""What travels beside the hidden states between layers, by who gives and who takes it."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from megatron.vlm.models.flow import Carrier
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.flow import Extra
from omnibal_ext.modalities.modality import VISION


def beside(model: Architecture, ranks: int, is_shared_out: bool) -> list[tuple[int, int]]:
    """Behind every layer features of the tower, and numbers of a row of what language layers read, by walking the
    chain: what has come and is still asked for."""
    vision, language, found, seen = model.vision, model.language, [], Counter[str]()
    for kind in model.chain:
        seen[kind] += 1
        layer = seen["llm"] - 1
        waiting = [n for n, taken in enumerate(vision.feature_layers) if taken < seen["vit"] and n > layer]
        later = language.each_layer[layer + 1 :]
        givers = {one.keys_from for one in later if one.keys_from is not None and one.keys_from <= layer}
        heads = [one for giver in givers if (one := language.each_layer[giver].attention)]
        keys = sum(2 * max(1, one.groups_over(ranks) // ranks) * one.head_dim for one in heads)
        first = language.hidden_size if language.layer_inputs and seen["word_embed"] and later else 0
        gone = vision.side_by_side and seen["projector"]
        found.append((0 if gone else len(waiting), first + keys * (ranks if is_shared_out else 1)))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_presets_carry_what_has_come_and_is_still_asked_for(ranks: int) -> None:
    for model in PRESETS.values():
        for is_shared_out in (False, True):
            features, numbers = zip(*beside(model, ranks, is_shared_out), strict=True)
            assert model.features_after == features, model.name
            tensors = tuple(-(-own // model.language.hidden_size) for own in numbers)
            assert model.carried_after(ranks, is_shared_out) == (tensors if any(tensors) else ()), model.name


EXTRAS = (
    Extra("sound", 0, (5,), (2, 3)), Extra("like", 1, (2,), of=VISION),
    Extra("like", 2, (4,), of=VISION, added=True), Extra("shared", 2, (3, 4, 5)),
    Extra("one", 2, (3, 5), (5,), rows=0), Extra("more", 3, (5,), (1, 7), rows=2),
)  # fmt: skip
"""Of a chain of six layers, of two towers if one likes, four numbers a row; `more` has two rows for each."""


def run(cuts: tuple[int, ...], rows: int, texts_alone: bool = False) -> tuple[Tensor, list[Tensor], list[int]]:
    """Layers that multiply what they read into what they give, in stages that begin at `cuts`: what comes out,
    gradients of their weights, rows of what went between stages."""
    carrier = Carrier(tuple(one for one in EXTRAS if not (texts_alone and one.of)))
    weights = [torch.tensor(1.0 + layer / 7, requires_grad=True) for layer in range(6)]

    def module(layer: int, hidden: Tensor | None, *read: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = (torch.ones(rows, 1, 4) if hidden is None else hidden) * weights[layer]
        for number, one in enumerate(read):
            out = out + (number + 2) * one.sum() * weights[layer]
        given = [one for one in carrier.extras if one.giver == layer]
        if all(not one.shape for one in given) and len(given) < 2:
            return out  # which is what it gives
        made = [torch.arange(1.0, 1 + torch.Size(one.shape_of(rows, 4)).numel()) for one in given]
        return out, *(weights[layer] * own.view(one.shape_of(rows, 4)) for own, one in zip(made, given, strict=True))

    tensor, sent = None, []
    for first, end in zip((0, *cuts), (*cuts, 6), strict=True):
        flow = carrier.split(first, tensor)
        for layer in range(first, end):
            flow = carrier.through(layer, flow, lambda *taken, layer=layer: module(layer, *taken))
        tensor = carrier.joined(end, flow)
        assert len(tensor) == (carrier.rows(end, rows, 4) if end < 6 else rows)
        sent.append(len(tensor))
    assert tensor is not None
    return tensor, list(torch.autograd.grad(tensor.sum(), weights)), sent


@pytest.mark.parametrize("texts_alone", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (5,), (1, 2, 3, 4, 5)])
def test_stages_give_what_one_gives(cuts: tuple[int, ...], texts_alone: bool) -> None:
    whole, wanted, _ = run((), 3, texts_alone)
    found, gradients, _ = run(cuts, 3, texts_alone)
    assert torch.equal(whole, found)
    assert all(map(torch.allclose, gradients, wanted))


def test_a_stage_receives_whole_rows() -> None:
    """By hand, of three rows: `sound` has six numbers a row, two tensors; `like` is one more, from layer 2 on `shared`
    too, and `one` two rows; from layer 3 on `more` has fourteen numbers a row, with `sound` five tensors."""
    assert run((1, 2, 3, 4, 5), 3)[2][:5] == [9, 12, 17, 26, 23]


def test_hidden_states_without_rows_are_split_and_joined_too() -> None:
    """Of a tower's layer that has nothing to encode, or a stage of a rank whose team has the images."""
    carrier = Carrier(EXTRAS[1:3])
    flow = carrier.split(2, torch.empty(0, 1, 4))
    assert flow.extras["like"].shape == (0, 1, 4)
    passed = carrier.through(2, flow, lambda hidden, *_: hidden)
    assert carrier.joined(3, passed).shape == (0, 1, 4)
