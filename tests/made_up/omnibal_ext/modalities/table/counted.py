"""Matrices, work and weights of the layers of an encoder of tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnibal_ext.modalities.matrix import APART, Matrix, Stored, perceptron
from omnibal_ext.modalities.modality import TABLE, Size
from omnibal_ext.modalities.table.architecture import TableArchitecture
from omnibal_ext.modalities.vision.layer_work import vit_work
from omnibal_ext.modalities.weights import Shape, layer_norms, norm
from omnibal_ext.modalities.work import BYTES, Work

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def matrices(model: "Architecture", ranks: int, stored: Stored = APART) -> dict[str, tuple[Matrix, ...]]:
    """Return the matrices of one layer of each kind."""
    table, out = TableArchitecture.among(model.further), model.language.hidden_size
    width, head = table.hidden_size, table.hidden_size // table.heads
    heads = head * table.as_vit.heads_over(ranks)
    return {
        "table": (
            Matrix("self_attention.linear_qkv", 3 * heads, width, (head,) * 3),
            Matrix("self_attention.linear_proj", width, heads, by_rows=True),
            *perceptron("mlp.", width, table.ffn_hidden_size, gated=False),
        ),
        "table_projector": (Matrix("linear", out * table.tokens_a_row, width),),
    }


def works(model: "Architecture", units: Mapping[Size, int], t: int, e: int) -> dict[str, Work]:
    """Return the work of one layer of each kind on one table."""
    table, rows, out = TableArchitecture.among(model.further), units[TABLE.size], model.language.hidden_size
    found, h, tokens = matrices(model, t), table.hidden_size, table.tokens(rows)
    weights = {kind: sum(matrix.weights for matrix in some) for kind, some in found.items()}
    embed, projector = table.numbers * h, weights["table_projector"]
    return {
        "table_embed": Work(embed + h, embed, rows, h, rows * table.numbers * BYTES, copies=True, input_gradient=0.0),
        "table": vit_work(table.as_vit, weights["table"], rows, rows * rows, t),
        "table_projector": Work(
            projector + out * table.tokens_a_row + 2 * h, projector, tokens, out, rows * 2 * h * t * BYTES,
            whole_output=True,
        ),
    }  # fmt: skip


def weights(model: "Architecture", kind: str, name: str) -> dict[str, Shape]:
    """Return the weights that layers of a kind may have."""
    table = TableArchitecture.among(model.further)
    if kind == "table_embed":
        return {"linear.weight": (table.hidden_size, table.numbers), "linear.bias": (table.hidden_size,)}
    return layer_norms(table.hidden_size) if kind == "table" else norm("norm", table.hidden_size)
