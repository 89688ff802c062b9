"""Low-rank adapters (`omnibal_ext.adapters`) of linear layers that are tensor-parallel.

    column-parallel    A whole on every rank, B cut along the layer's rows
    row-parallel       A cut along the layer's columns, B whole: the outputs of A are summed over ranks before B

Ranks exchange `rank` numbers a token, not a width. Under sequence parallelism A multiplies this rank's tokens before
they are gathered, and B of a row-parallel layer those after the reduce-scatter: gradients of these two are of this
rank's tokens only, and marked for Megatron to sum.

An adapter is a sibling module of its layer, `linear_qkv_adapter` of `linear_qkv`, and the layer's `forward` adds its
output. So recomputation, delayed weight gradients and checkpoints of the layer need not know of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear as multiply
from torch.nn.functional import pad

from megatron.vlm.models.attention.padding import loads_without_padding
from omnibal_ext.adapters import SUFFIX, Adapters
from omnibal_ext.modalities.matrix import Matrix


class Adapter(torch.nn.Module):
    """The adapters of one linear layer, for each of the `fused` matrices in it: alpha / rank * B (A x).

    a [fused * rank, columns here], b [rows here, rank]. B is initialised to zero, A as in peft: uniform within one over
    the root of its columns, drawn whole from `generator`, so that ranks of any group cut the same matrix.
    """

    mask: Tensor
    """[rows here, fused], one where the row is of that matrix (query, key, value; gate, up)."""
    is_left_out = False
    """Whether a checkpoint without adapters is being read: they then keep their initial weights."""

    def __init__(self, layer: Any, matrix: Matrix, adapters: Adapters, generator: torch.Generator) -> None:
        super().__init__()
        self.matrix, self.scale = matrix, adapters.scale
        self.shares_sequence = bool(layer.sequence_parallel)
        rows, columns = layer.weight.shape
        drawn = torch.rand(matrix.fused * adapters.rank, matrix.columns, generator=generator, device="cpu")
        whole = (2 * drawn - 1) / matrix.columns**0.5
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.a = torch.nn.Parameter(_here(whole, matrix, columns).to(**like))
        self.b = torch.nn.Parameter(torch.zeros(rows, adapters.rank, **like))
        mask = rows_of_matrices(matrix, rows, parallel_state.get_tensor_model_parallel_rank())
        self.register_buffer("mask", mask.to(**like), persistent=False)
        cut, whole_one = (self.a, self.b) if matrix.by_rows else (self.b, self.a)
        stride = 2 if matrix.is_stacked else 1
        tensor_parallel.set_tensor_model_parallel_attributes(cut, True, int(matrix.by_rows), stride)
        setattr(whole_one, "sequence_parallel", self.shares_sequence)  # noqa: B010 (Megatron marks weights so)

    def forward(self, entering: Tensor, out: Tensor) -> Tensor:
        """Return `out` [tokens, 1, rows here] plus the adapter's output for the layer's input [tokens, 1, columns
        here]."""
        inner = multiply(entering, self.a)
        if self.matrix.by_rows:
            add_up = reduce_from_tensor_model_parallel_region
            inner = reduce_scatter_to_sequence_parallel_region(inner) if self.shares_sequence else add_up(inner)
        elif self.shares_sequence:
            inner = tensor_parallel.gather_from_sequence_parallel_region(inner)
        else:
            inner = tensor_parallel.copy_to_tensor_model_parallel_region(inner)
        rows = out.flatten(end_dim=-2), (inner * self.scale).flatten(end_dim=-2)
        return torch.addmm(*rows, wide(self.b, self.mask).t()).view_as(out)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the checkpoint's entries, to be read at any tensor-parallel size; none inside `left_out`."""
        if self.is_left_out:
            return {}
        assert metadata is not None
        groups = {"tp_group": parallel_state.get_tensor_model_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}
        cut = {"a": 1} if self.matrix.by_rows else {"b": 0}
        weights = self.state_dict(prefix="", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(weights, prefix, cut, sharded_offsets, **groups)
        if self.matrix.is_stacked:
            state[f"{prefix}b"] = apply_swiglu_sharded_factory(
                state[f"{prefix}b"], sharded_offsets, tp_group=groups["tp_group"], dp_group=groups["dp_cp_group"]
            )
        return state if self.matrix.name.startswith("mlp.") else loads_without_padding(state)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        if not self.is_left_out:
            super()._load_from_state_dict(*arguments, **options)


def attach(module: Any, matrices: tuple[Matrix, ...], adapters: Adapters, seed: int) -> None:
    """Give linear layers of `module` that `matrices` name adapters drawn from `seed`; `forward` adds their output."""
    generator = torch.Generator().manual_seed(seed)
    for matrix in matrices:
        above, _, name = matrix.name.rpartition(".")
        layer = module.get_submodule(matrix.name)
        adapter = Adapter(layer, matrix, adapters, generator)
        module.get_submodule(above).add_module(f"{name}{SUFFIX}", adapter)
        layer.forward = partial(_adapted, layer.forward, adapter)


def adapters_in(module: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield all adapters of a module, with their names in it."""
    return ((name, found) for name, found in module.named_modules() if isinstance(found, Adapter))


@torch.no_grad()
def merge(module: torch.nn.Module, kinds: Mapping[str, torch.dtype]) -> None:
    """Add a module's adapters, whole on this rank, to their layers' weights, in the dtypes `kinds` (by weight's name).
    The adapters' output is zero from then on."""
    for name, adapter in adapters_in(module):
        weight = f"{name.removesuffix(SUFFIX)}.weight"
        whole, a, b, mask = (each.cpu() for each in (module.get_parameter(weight), adapter.a, adapter.b, adapter.mask))
        merged = whole + adapter.scale * (wide(b, mask) @ a)  # by the host: rounds as it was written
        module.get_parameter(weight).copy_(merged.to(kinds[weight]))
        adapter.b.zero_()


@contextmanager
def left_out(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Make a context in which checkpoints are saved and read without the adapters of these modules."""
    found = [adapter for module in modules for _, adapter in adapters_in(module)]
    for adapter in found:
        adapter.is_left_out = True
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_left_out = False


def wide(b: Tensor, mask: Tensor) -> Tensor:
    """Spread B [rows, rank] to [rows, fused * rank]: each row in its fused matrix's columns (`mask`), else zero."""
    return b if mask.shape[1] == 1 else (mask[:, :, None] * b[:, None]).flatten(1)


def rows_of_matrices(matrix: Matrix, rows: int, rank: int) -> Tensor:
    """Return bool [rows, fused]: whether a row of this tensor-parallel rank is of that one of the fused matrices."""
    return matrix_of_rows(matrix, rows, rank)[:, None] == torch.arange(matrix.fused, device="cpu")


def matrix_of_rows(matrix: Matrix, rows: int, rank: int) -> Tensor:
    """Return which fused matrix (query 0, key 1, ...) each of a tensor-parallel rank's rows is of, int64 [rows]."""
    shares = (rows // matrix.fused,) * matrix.fused if matrix.is_stacked else matrix.shares
    group = torch.tensor([number for number, share in enumerate(shares) for _ in range(share)], device="cpu")
    return group[torch.arange(rank * rows, (rank + 1) * rows, device="cpu") % len(group)]


def _adapted(layer: Any, adapter: Adapter, entering: Tensor, *others: Any, **options: Any) -> Any:
    """Run a layer's `forward` and add its adapter's output."""
    out, bias = layer(entering, *others, **options)
    return adapter(entering, out), bias


def _here(whole: Tensor, matrix: Matrix, columns: int) -> Tensor:
    """Cut this rank's part of a whole A; columns of padding heads on the last ranks are zero, and stay so."""
    if not matrix.by_rows:
        return whole
    group = parallel_state.get_tensor_model_parallel_group()
    filled = pad(whole, (0, columns * group.size() - whole.shape[1]))
    return filled.narrow(1, group.rank() * columns, columns)
