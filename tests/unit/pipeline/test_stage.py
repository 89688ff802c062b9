"""A pack that passes a layer by gives its weights no gradient, and lets Megatron reduce as if it had."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.pipeline.stage import _pass_by


class Link(torch.nn.Module):
    """Rows times a weight each; or passed by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, rows: torch.Tensor, passes_by: bool) -> torch.Tensor:
        return _pass_by([*self.parameters()], (0, 2), rows) if passes_by else rows * self.weight


@pytest.fixture
def wrapped(one_rank: None) -> Iterator[DistributedDataParallel]:
    """A layer as Megatron wraps it, gradients reduced beside the backward pass."""
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    yield DistributedDataParallel(config, settings, Link())
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("order", ["by", "real", "by real", "real by", "by real by real real"])
def test_what_passes_by_adds_nothing_and_writes_nothing(wrapped: DistributedDataParallel, order: str) -> None:
    """What a layer's weight is handed then is not read; the gradients before and after count."""
    weight, kinds = wrapped.module.weight, order.split()
    rows = torch.tensor([[5.0, 7.0]], requires_grad=True)
    for number, kind in enumerate(kinds):
        last = number + 1 == len(kinds)
        before = weight.main_grad._version
        with contextlib.nullcontext() if last else wrapped.no_sync():
            out = wrapped(rows, kind == "by")
            out.backward(torch.ones_like(out))
        assert (weight.main_grad._version == before) == (kind == "by")
        assert not weight.grad_added_to_main_grad
        assert weight.grad is None
    wrapped.finish_grad_sync()
    assert torch.equal(weight.main_grad, kinds.count("real") * rows.detach()[0])
    assert torch.equal(rows.grad if rows.grad is not None else torch.zeros(1, 2),
                       kinds.count("real") * torch.tensor([[2.0, 3.0]]))  # fmt: skip


def test_a_fused_product_s_mark_stays(wrapped: DistributedDataParallel) -> None:
    """Its weight is told once that its gradients are added where they arise."""
    weight = wrapped.module.weight
    weight.grad_added_to_main_grad = True
    wrapped(torch.ones(1, 2), True).sum().backward()
    assert weight.grad_added_to_main_grad


def test_without_megatron_s_sums_gradients_are_zero(one_rank: None) -> None:
    layer = Link()
    layer(torch.ones(1, 2), True).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(2))
