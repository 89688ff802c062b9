"""A linear layer of a kind of layer: shape, tensor-parallel split, and whether it gets an adapter."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Matrix:
    """An unsharded matrix [rows, columns]; `name` is that of its module within a layer."""

    name: str
    rows: int
    columns: int
    shares: tuple[int, ...] = (1,)
    """Rows of the Hugging Face matrices that it concatenates: gate, up; or, of each group of heads, query, key, value,
    and of linear attention what is convolved, gates, rates, decays: group by group."""
    by_rows: bool = False
    """Megatron's RowParallelLinear: tensor-parallel ranks have parts of the columns, and outputs are summed."""
    is_stacked: bool = False
    """Whether it is gate and up, each sharded over tensor-parallel ranks."""
    is_adaptable: bool = True
    """Whether it gets an adapter if its part of the model has them."""
    experts: int = 0
    """Number of experts that have one each; 0: it is not in an expert."""
    chosen: int = 1
    """Number of these experts that a token goes through."""

    @property
    def fused(self) -> int:
        """Number of Hugging Face matrices that it concatenates; its adapter has a matrix A for each."""
        return len(self.shares)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight in our checkpoints; those of experts are stacked."""
        return (self.experts, self.rows, self.columns) if self.experts else (self.rows, self.columns)

    @property
    def weights(self) -> int:
        """Number of parameters, in all experts."""
        return self.rows * self.columns * max(1, self.experts)

    @property
    def multiplied(self) -> int:
        """Number of parameters that one token is multiplied with."""
        return self.rows * self.columns * self.chosen

    def numbers(self, rank: int, tensor: int = 1) -> float:
        """Return how many parameters an adapter of this rank has on one of `tensor` ranks, which shard A or B."""
        rows, columns = (self.rows, self.columns / tensor) if self.by_rows else (self.rows / tensor, self.columns)
        return rank * (self.fused * columns + rows)


@dataclass(frozen=True, slots=True)
class Stored:
    """Matrices that are one in a model's published weights, with one adapter, and several in other models'."""

    qkv: bool = False
    """Whether an encoder's query, key and value are one matrix."""
    gate_and_up: bool = False
    """Whether the language model's gate and up are one matrix."""


APART = Stored()
"""No matrices are joined: enough where only the number of weights matters."""


def perceptron(
    prefix: str,
    width: int,
    inner: int,
    gated: bool = True,
    shares: tuple[int, ...] = (1,),
    experts: int = 0,
    chosen: int = 1,
) -> tuple[Matrix, ...]:
    """Return the two matrices of an MLP, `width` to `inner` to `width`; `gated`: the first has gate above up."""
    opened = Matrix(f"{prefix}linear_fc1", inner * (1 + gated), width, shares, is_stacked=gated)
    closed = Matrix(f"{prefix}linear_fc2", width, inner, by_rows=True)
    return tuple(replace(matrix, experts=experts, chosen=chosen) for matrix in (opened, closed))
