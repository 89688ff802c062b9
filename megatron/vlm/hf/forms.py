"""How the tensors of one weight lie in ours and in theirs. Every form only moves numbers: back and forth is bit-exact.

query, key, value    theirs  q0 q1 q2 q3 | k0 k1 | v0 v1        ours  q0 q1 k0 v0 | q2 q3 k1 v1    (two groups)
gate, up             theirs  gate | up                          ours  gate up
transposed           theirs  [in, out]                          ours  [out, in]
experts              theirs  [out, in] each                     ours  [experts, out, in]
either way           theirs  [experts, in, out], as published   ours  [experts, out, in]
                     or as ours, as transformers 5 saves
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnibal_ext.architectures.architecture import Architecture


@dataclass(frozen=True)
class Form:
    """`join` makes ours of theirs; `split` makes theirs of ours, their outer shape left to the reader."""

    join: Callable[[Sequence[Tensor], Architecture], Tensor]
    split: Callable[[Tensor, Architecture], tuple[Tensor, ...]]


def _same(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    (tensor,) = tensors
    return tensor


def _tokens(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    """Any shape that ends in the width -> [tokens, 1, width]."""
    (tensor,) = tensors
    return tensor.reshape(-1, 1, tensor.shape[-1])


def _row(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    (tensor,) = tensors
    return tensor.reshape(1, -1)


def _alone(tensor: Tensor, _: Architecture) -> tuple[Tensor, ...]:
    return (tensor,)


def _stack(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    return torch.cat(list(tensors))


def _stack_experts(tensors: Sequence[Tensor], _: Architecture) -> Tensor:
    """gate and up of one expert after the other [inner, width] -> [experts, 2 * inner, width]."""
    return torch.stack([torch.cat(halves) for halves in zip(tensors[::2], tensors[1::2], strict=True)])


def _split_experts(tensor: Tensor, _: Architecture) -> tuple[Tensor, ...]:
    return tuple(half for expert in tensor for half in expert.chunk(2))


def _join_qkv(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """q [heads * d, ...], k and v [groups * d, ...] -> [groups * (heads / groups + 2) * d, ...]."""
    parts = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _split_qkv(tensor: Tensor, groups: int, width: int) -> tuple[Tensor, ...]:
    grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
    parts = grouped.split([grouped.shape[1] - 2 * width, width, width], dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def _vision(architecture: Architecture) -> tuple[int, int]:
    vision = architecture.vision
    return vision.heads, vision.hidden_size // vision.heads


def _language(architecture: Architecture) -> tuple[int, int]:
    return architecture.language.kv_heads, architecture.language.head_dim


FORMS = {
    "same": Form(_same, _alone),
    "tokens": Form(_tokens, _alone),
    "row": Form(_row, _alone),
    "transposed": Form(lambda tensors, model: _same(tensors, model).mT, lambda tensor, _: (tensor.mT,)),
    "experts": Form(lambda tensors, _: torch.stack(list(tensors)), lambda tensor, _: tensor.unbind()),
    "stacked_experts": Form(_stack_experts, _split_experts),
    "stacked": Form(_stack, lambda tensor, _: tensor.chunk(2)),
    "vision_qkv": Form(
        lambda tensors, model: _join_qkv(tensors, model.vision.heads),
        lambda tensor, model: _split_qkv(tensor, *_vision(model)),
    ),
    "vision_packed_qkv": Form(
        lambda tensors, model: _join_qkv(_same(tensors, model).chunk(3), model.vision.heads),
        lambda tensor, model: (torch.cat(_split_qkv(tensor, *_vision(model))),),
    ),
    "language_qkv": Form(
        lambda tensors, model: _join_qkv(tensors, model.language.kv_heads),
        lambda tensor, model: _split_qkv(tensor, *_language(model)),
    ),
}


def settled(form: str, stored: Sequence[int], wanted: Sequence[int]) -> str:
    """The form of a weight whose shapes are known: which way up theirs lie where they come either way.

    As transformers decides: those of the shape that its model has stay as they are.
    """
    if form != "either_way":
        return form
    return "same" if tuple(stored) == tuple(wanted) else "transposed"


def join(form: str, tensors: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Our weight, of theirs."""
    return FORMS[form].join(tensors, architecture)


def split(form: str, tensor: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
    """Their weights, of ours."""
    return FORMS[form].split(tensor, architecture)
