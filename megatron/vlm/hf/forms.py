"""Forms in which Hugging Face's tensors (theirs) and our one hold the same weight. They only move numbers: bit-exact.

query, key, value    theirs  q0 q1 q2 q3 | k0 k1 | v0 v1        ours  q0 q1 k0 v0 | q2 q3 k1 v1    (two groups)
with a gate          theirs  q0 g0 q1 g1 q2 ... | k0 k1 | ...   ours  q0 q1 g0 g1 k0 v0 | q2 q3 g2 g3 k1 v1
gate, up             theirs  gate | up                          ours  gate up
neighbours           theirs  pairs 0 1 | 2 3 | 4 5 of a head     ours  0 2 4 | 1 3 5, as the rotation has them
transposed           theirs  [in, out]                          ours  [out, in]
one frame            theirs  [out, 3, size, size]               ours  [out, 3, 1, size, size]
squares              theirs  [out, in, side, side], any shape   ours  [out, side * side * in]
experts              theirs  [out, in] each                     ours  [experts, out, in]
linear               theirs  q | k | v, z, b, a                 ours  q0 k0 v0 v1 z0 z1 b0 b1 a0 a1 | q1 k1 v2 v3 ...
convolution          theirs  q | k | v                          ours  q0 k0 v0 v1 | q1 k1 v2 v3
no bias of keys      theirs  q | v                              ours  q0 k0 v0 | q1 k1 v1, where k is zero
keys alone           theirs  q0 q1 q2 q3 | k0 k1                ours  q0 q1 k0 | q2 q3 k1    (keys serve as values)
ranges               theirs  four numbers a matrix, [] each    ours  [matrices, 4]
patches              theirs  [width, rows x columns x colours]  ours  [width, colours, 1, rows, columns]
pixels               theirs  [rows x columns x colours]         ours  [colours x rows x columns]
axes                 theirs  [positions, 2, width]              ours  [2, positions, width]
either way           theirs  [experts, in, out], as published   ours  [experts, out, in]
                     or as ours, as transformers 5 saves
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain as joined

import torch
from torch import Tensor

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.modality import ENCODED, Modality


@dataclass(frozen=True)
class Scope:
    """A weight's model and, for language layers, its layer."""

    model: Architecture
    layer: Layer | None = None

    @property
    def attention(self) -> Attention:
        """Attention of the layer."""
        assert self.layer is not None
        assert self.layer.attention is not None
        return self.layer.attention


@dataclass(frozen=True)
class Form:
    """A pair of conversions: `join` Hugging Face's tensors to ours, `split` ours (callers restore leading sizes)."""

    join: Callable[[Sequence[Tensor], Scope], Tensor]
    split: Callable[[Tensor, Scope], tuple[Tensor, ...]]


def _same(tensors: Sequence[Tensor], _: Scope) -> Tensor:
    (tensor,) = tensors
    return tensor


def _tokens(tensors: Sequence[Tensor], _: Scope) -> Tensor:
    """Reshape any shape that ends in the width to [tokens, 1, width]."""
    (tensor,) = tensors
    return tensor.reshape(-1, 1, tensor.shape[-1])


def _row(tensors: Sequence[Tensor], _: Scope) -> Tensor:
    (tensor,) = tensors
    return tensor.reshape(1, -1)


def _join_squares(tensors: Sequence[Tensor], scope: Scope) -> Tensor:
    """Reorder a matrix over squares of patches: [out, in x patches] -> [out, patches x in]."""
    weight = _same(tensors, scope)
    return weight.reshape(len(weight), -1, scope.model.shuffle**2).mT.flatten(1)


def _split_squares(tensor: Tensor, scope: Scope) -> tuple[Tensor, ...]:
    return (tensor.reshape(len(tensor), scope.model.shuffle**2, -1).mT,)


def _alone(tensor: Tensor, _: Scope) -> tuple[Tensor, ...]:
    return (tensor,)


def _stack(tensors: Sequence[Tensor], _: Scope) -> Tensor:
    return torch.cat(list(tensors))


def _stack_experts(tensors: Sequence[Tensor], _: Scope) -> Tensor:
    """Stack gate, up of each expert in turn, each [inner, width], to [experts, 2 * inner, width]."""
    return torch.stack([torch.cat(halves) for halves in zip(tensors[::2], tensors[1::2], strict=True)])


def _split_experts(tensor: Tensor, _: Scope) -> tuple[Tensor, ...]:
    return tuple(half for expert in tensor for half in expert.chunk(2))


def _join_groups(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """Join tensors such as q, k, v, each [groups * n, ...], to one [groups * sum of n, ...], group by group."""
    parts = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _split_groups(tensor: Tensor, groups: int, sizes: list[int]) -> tuple[Tensor, ...]:
    parts = tensor.reshape(groups, -1, *tensor.shape[1:]).split(sizes, dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def _grouped(rows: Callable[[Scope], tuple[int, list[int]]], packed: int = 1) -> Form:
    """Make the form of parts, such as q, k, v: interleaved group by group in ours, one behind the other in theirs.

    `rows`: the number of groups, and the rows of each part in one of them. The first `packed` parts are one tensor
    there.
    """

    def joined(tensors: Sequence[Tensor], scope: Scope) -> Tensor:
        groups, sizes = rows(scope)
        first = tensors[0].split([groups * size for size in sizes[:packed]])
        return _join_groups([*first, *tensors[1:]], groups)

    def apart(tensor: Tensor, scope: Scope) -> tuple[Tensor, ...]:
        parts = _split_groups(tensor, *rows(scope))
        return torch.cat(parts[:packed]), *parts[packed:]

    return Form(joined, apart)


def _rows_of(modality: Modality) -> Callable[[Scope], tuple[int, list[int]]]:
    """Return the `rows` of `_grouped` for an encoder: query, key, value of each head."""

    def rows(scope: Scope) -> tuple[int, list[int]]:
        sizes = scope.model.sizes(modality)
        return sizes.heads, [sizes.hidden_size // sizes.heads] * 3

    return rows


def _encoder_forms(modality: Modality) -> dict[str, Form]:
    """Return three forms of an encoder's query, key, value, by name: apart, in one tensor, and without keys, as biases
    are."""
    rows = _rows_of(modality)
    apart = _grouped(rows)
    without = Form(
        lambda tensors, scope: apart.join([tensors[0], torch.zeros_like(tensors[0]), tensors[1]], scope),
        lambda tensor, scope: apart.split(tensor, scope)[::2],
    )
    name = modality.name
    return {f"{name}_qkv": apart, f"{name}_packed_qkv": _grouped(rows, packed=3), f"{name}_qv": without}


def _language_rows(scope: Scope) -> tuple[int, list[int]]:
    groups, width = scope.attention.kv_heads, scope.attention.head_dim
    return groups, [scope.attention.heads // groups * width, width, width]


def _rows_without_values(scope: Scope) -> tuple[int, list[int]]:
    groups, sizes = _language_rows(scope)
    return groups, sizes[:2]


def _linear_rows(scope: Scope) -> tuple[int, list[int]]:
    """Return the `rows` of `_grouped` for q, k, v, z, b, a of linear attention."""
    assert scope.layer is not None
    linear = scope.layer.linear
    assert linear is not None
    values, heads = linear.heads_a_group * linear.value_width, linear.heads_a_group
    return linear.groups, [linear.key_width, linear.key_width, values, values, heads, heads]


def _convolved_rows(scope: Scope) -> tuple[int, list[int]]:
    groups, sizes = _linear_rows(scope)
    return groups, sizes[:3]


LANGUAGE_QKV, CONVOLVED = _grouped(_language_rows), _grouped(_convolved_rows, packed=3)


def _halves(tensor: Tensor, scope: Scope) -> Tensor:
    """Reorder rotary pairs (0, 1), (2, 3), ... of each head to all first numbers, then all second ones."""
    return _reordered(tensor, scope, lambda turning: turning.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2))


def _neighbours(tensor: Tensor, scope: Scope) -> Tensor:
    return _reordered(tensor, scope, lambda turning: turning.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def _reordered(tensor: Tensor, scope: Scope, order: Callable[[Tensor], Tensor]) -> Tensor:
    heads = tensor.unflatten(0, (-1, scope.attention.head_dim))
    width = scope.attention.rotary_width
    return torch.cat([order(heads[:, :width]), heads[:, width:]], dim=1).flatten(0, 1)


def _join_neighbours(tensors: Sequence[Tensor], scope: Scope) -> Tensor:
    query, key, value = tensors
    return LANGUAGE_QKV.join([_halves(query, scope), _halves(key, scope), value], scope)


def _split_neighbours(tensor: Tensor, scope: Scope) -> tuple[Tensor, ...]:
    query, key, value = LANGUAGE_QKV.split(tensor, scope)
    return _neighbours(query, scope), _neighbours(key, scope), value


def _gated(tensors: Sequence[Tensor], scope: Scope) -> Tensor:
    """Join query | gate of each head, key, value to queries, gates, key, value of each group."""
    both, *others = tensors
    width = scope.attention.head_dim
    heads = both.reshape(-1, 2, width, *both.shape[1:])
    return _join_groups([heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1), *others], scope.attention.kv_heads)


def _split_gated(tensor: Tensor, scope: Scope) -> tuple[Tensor, ...]:
    groups, (queries, width, _) = _language_rows(scope)
    query, gate, key, value = _split_groups(tensor, groups, [queries, queries, width, width])
    heads = [part.reshape(-1, 1, width, *part.shape[1:]) for part in (query, gate)]
    return torch.cat(heads, dim=1).flatten(0, 2), key, value


def _join_patches(tensors: Sequence[Tensor], scope: Scope) -> Tensor:
    side = scope.model.vision.patch_size
    (weight,) = tensors
    return weight.reshape(-1, side, side, 3).permute(0, 3, 1, 2).unsqueeze(2).contiguous()


def _split_patches(tensor: Tensor, _: Scope) -> tuple[Tensor, ...]:
    return (tensor.squeeze(2).permute(0, 2, 3, 1).flatten(1),)


FORMS = {
    "same": Form(_same, _alone),
    "tokens": Form(_tokens, _alone),
    "row": Form(_row, _alone),
    "one_frame": Form(lambda tensors, scope: _same(tensors, scope).unsqueeze(2), _alone),
    "squares": Form(_join_squares, _split_squares),
    "transposed": Form(lambda tensors, scope: _same(tensors, scope).mT, lambda tensor, _: (tensor.mT,)),
    "experts": Form(lambda tensors, _: torch.stack(list(tensors)), lambda tensor, _: tensor.unbind()),
    "stacked_experts": Form(_stack_experts, _split_experts),
    "stacked": Form(_stack, lambda tensor, _: tensor.chunk(2)),
    **dict(joined.from_iterable(_encoder_forms(one).items() for one in ENCODED)),
    "language_qkv": LANGUAGE_QKV,
    "keys_alone": _grouped(_rows_without_values),
    "ranges": Form(
        lambda tensors, _: torch.stack(list(tensors)).reshape(-1, 4), lambda tensor, _: tensor.flatten().unbind()
    ),
    "patches": Form(_join_patches, _split_patches),
    "pixels": Form(
        lambda tensors, scope: _join_patches(tensors, scope).flatten(),
        lambda tensor, scope: _split_patches(tensor.view(1, 3, 1, scope.model.vision.patch_size, -1), scope),
    ),
    "axes": Form(
        lambda tensors, scope: _same(tensors, scope).transpose(0, 1), lambda tensor, _: (tensor.transpose(0, 1),)
    ),
    "neighbours_qkv": Form(_join_neighbours, _split_neighbours),
    "gated_qkv": Form(_gated, _split_gated),
    "linear": _grouped(_linear_rows, packed=3),
    "convolution": Form(
        lambda tensors, scope: CONVOLVED.join([_same(tensors, scope).flatten(1)], scope), CONVOLVED.split
    ),
}


def resolve_form(form: str, stored: Sequence[int], wanted: Sequence[int]) -> str:
    """Resolve "either_way" to "same" or "transposed", from the stored and the wanted shape, as transformers decides."""
    if form != "either_way":
        return form
    return "same" if tuple(stored) == tuple(wanted) else "transposed"


def join(form: str, tensors: Sequence[Tensor], scope: Scope) -> Tensor:
    """Join Hugging Face's tensors to our weight by the form of that name."""
    return FORMS[form].join(tensors, scope)


def split(form: str, tensor: Tensor, scope: Scope) -> tuple[Tensor, ...]:
    """Split our weight into Hugging Face's tensors by the form of that name."""
    return FORMS[form].split(tensor, scope)
