"""The matrices of a ViT's layers, and of its projector."""

from typing import TYPE_CHECKING

from omnibal_ext.modalities.matrix import APART, Matrix, Stored, perceptron

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def matrices(model: "Architecture", ranks: int, stored: Stored = APART) -> dict[str, tuple[Matrix, ...]]:
    """Return the matrices in one layer of each kind, by cost key, heads padded for `ranks` tensor-parallel ranks."""
    layers = dict.fromkeys(model.kinds_apart("vit"), _layer(model, ranks, stored))
    return layers | {"projector": _projector(model)}


def _layer(model: "Architecture", ranks: int, stored: Stored) -> tuple[Matrix, ...]:
    vision = model.vision
    width, inner, head = vision.hidden_size, vision.ffn_hidden_size, vision.hidden_size // vision.heads
    heads = head * vision.heads_over(ranks)
    packed = vision.native is not None and stored.qkv
    return (
        Matrix("self_attention.linear_qkv", 3 * heads, width, (1,) if packed else (head,) * 3),
        Matrix("self_attention.linear_proj", width, heads, by_rows=True),
        *perceptron("mlp.", width, inner, vision.gated, (inner,) * (1 + vision.gated)),
    )


def _projector(model: "Architecture") -> tuple[Matrix, ...]:
    """Return the projector's matrices. Not adaptable: one that merges patches, the one behind it in "gated", and a
    single one behind pooling or a norm without a weight."""
    out, joined, width = model.language.hidden_size, model.joined_width, model.vision.hidden_size
    if model.pools or model.merger == "normed":
        return (Matrix("linear", out, joined, is_adaptable=False),)
    if model.merger == "shuffled":
        return (Matrix("linear", out, joined),)
    if model.merger == "matrix":
        merge = Matrix("merge", width, joined, is_adaptable=False)
        return (merge, Matrix("linear_fc1", out, width), Matrix("linear_fc2", out, out, by_rows=True))
    if model.merger == "gated":
        inner = model.merger_width
        bare = (Matrix("merge", out, joined, is_adaptable=False), Matrix("linear", out, out, is_adaptable=False))
        return (*bare, *perceptron("mlp.", out, inner, shares=(inner, inner)))
    inner = joined if model.vision.native else out
    names = ("", *(f"feature_{number}." for number in range(model.streams - 1)))
    return tuple(
        matrix
        for name in names
        for matrix in (
            Matrix(f"{name}linear_fc1", inner, joined), Matrix(f"{name}linear_fc2", out, inner, by_rows=True)
        )
    )  # fmt: skip
