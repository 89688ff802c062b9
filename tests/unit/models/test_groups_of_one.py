"""Tensor parallelism of one rank leaves nothing behind: no node in autograd's graph, no warning, no other number."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from torch import Tensor

from megatron.vlm import core_patches
from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.models.alone import alone
from megatron.vlm.models.configs import language_config

LINEARS = {
    "column": (ColumnParallelLinear, {"gather_output": False, "bias": True}),
    "row": (RowParallelLinear, {"input_is_parallel": True, "skip_bias_add": False, "bias": True}),
}


def nodes(out: Tensor) -> Iterator[str]:
    """The names of what autograd runs for an output."""
    left, seen = [out.grad_fn], set()
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [further for further, _ in node.next_functions]
            yield node.name()


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("trained", [True, False])
def test_a_linear_layer_of_one_rank_is_one_node_without_a_warning(
    inputs: TrainingInputs, kind: str, trained: bool
) -> None:
    """Its output and gradients are torch's, bit for bit."""
    cls, how = LINEARS[kind]
    config = language_config(inputs.args, inputs.architecture)
    linear = cls(8, 6, config=config, init_method=torch.nn.init.normal_, **how)
    linear.requires_grad_(trained)
    torch.nn.init.normal_(linear.bias)
    entering, gradient = torch.randn(5, 1, 8, requires_grad=True), torch.randn(5, 1, 6)
    with warnings.catch_warnings(action="error"):
        out, _ = linear(entering)
    found = list(nodes(out))
    assert sum(name.startswith("LinearWith") for name in found) == 1
    assert not [name for name in found if "ParallelRegion" in name]
    asked = [entering, linear.weight, linear.bias] if trained else [entering]
    own = torch.autograd.grad(out, asked, gradient)
    plain = torch.matmul(entering, linear.weight.t()) + linear.bias
    assert torch.equal(out, plain)
    assert all(map(torch.equal, own, torch.autograd.grad(plain, asked, gradient)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_more_ranks_exchanges(ranks: int) -> None:
    exchanged = core_patches._between_ranks(lambda tensor, group: tensor + group.size())
    tensor, group = torch.zeros(3), SimpleNamespace(size=lambda: ranks)
    assert (exchanged(tensor, group) is tensor) == (ranks == 1)
    assert exchanged(tensor, group).tolist() == [0.0 if ranks == 1 else 2.0] * 3


def test_the_group_that_is_found_is_core_s(inputs: TrainingInputs) -> None:
    """Of links that are run alone, this rank's; a group that is given stays."""
    find, given = mappings.get_tensor_model_parallel_group_if_none, SimpleNamespace()
    with warnings.catch_warnings(action="error"):
        assert find(None) is parallel_state.get_tensor_model_parallel_group()
        assert find(given) is given
        with alone():
            assert find(None) is parallel_state.get_context_parallel_group()
    with warnings.catch_warnings(action="ignore"):
        assert find(None, is_expert=True) is parallel_state.get_expert_tensor_parallel_group()
