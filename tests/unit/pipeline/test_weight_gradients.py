"""Weight gradients that wait: the same numbers by every kernel, and nothing is waited for in the open."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron.vlm.pipeline.weight_gradients import Grouped, Late, Linear, accumulate


@pytest.mark.parametrize("shared", [False, True], ids=["one use", "tied embeddings"])
def test_the_product_adds_to_main_grad_and_autograd_adds_nothing(shared: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    entering, grad = (torch.randn(5, 1, width, generator=generator) for width in (3, 2))
    weight = torch.nn.Parameter(torch.randn(2, 3, generator=generator))
    weight.main_grad = torch.ones(2, 3)
    weight.zero_out_wgrad = shared
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    accumulate([Linear((entering, grad), weight, None, None, fused=True)])
    wanted = 1 + torch.einsum("tbo,tbi->oi", grad, entering)
    assert torch.allclose(weight.main_grad, wanted)
    assert weight.grad_added_to_main_grad
    assert len(seen) == 1, "Megatron's hook counts one gradient"
    assert not shared or not seen[0].any(), "what another use of the weight adds would be lost or spoilt"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (2, 3)], ids=["a token", "a pack", "two of three tokens"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_late_gradients_of_a_linear_layer_are_autograds(
    seed: int, biased: bool, shape: tuple[int, int], fused: bool
) -> None:
    """Of weight and bias, sums over all tokens; twice as much after two microbatches."""
    generator = torch.Generator().manual_seed(seed)
    entering, grad = (torch.randn(*shape, width, generator=generator) for width in (3, 2))
    weight = torch.nn.Parameter(torch.randn(2, 3, generator=generator))
    bias = torch.nn.Parameter(torch.randn(2, generator=generator))
    wanted = torch.autograd.grad(torch.nn.functional.linear(entering, weight, bias), (weight, bias), grad)
    weight.main_grad = torch.zeros(2, 3)
    late = Linear((entering, grad), weight, bias if biased else None, None, fused)
    for times in (1, 2):
        accumulate([late])
        assert torch.allclose(weight.main_grad if fused else weight.grad, times * wanted[0], atol=1e-6)
        assert torch.allclose(bias.grad, times * wanted[1], atol=1e-6) if biased else bias.grad is None


@pytest.mark.parametrize("ends", [(2, 5, 6), (0, 6, 6), (6, 6, 6)], ids=["some each", "two without", "one has all"])
@pytest.mark.parametrize("seed", [0, 1])
def test_late_gradients_of_experts_are_autograds(seed: int, ends: tuple[int, ...]) -> None:
    """Three matrices, whose rows follow each other; one that no token went through gets zeros."""
    generator = torch.Generator().manual_seed(seed)
    entering, grad = (torch.randn(6, width, generator=generator) for width in (8, 4))
    weight = torch.nn.Parameter(torch.randn(3, 4, 8, generator=generator))
    rows = [entering[first:last] @ weight[number].t() for number, (first, last) in enumerate(pairwise((0, *ends)))]
    (wanted,) = torch.autograd.grad(torch.cat(rows), (weight,), grad)
    accumulate([Grouped((entering, grad), weight, torch.tensor(ends, dtype=torch.int32))])
    assert torch.allclose(weight.grad, wanted, atol=1e-6)


@dataclass
class Step:
    name: str
    said: list[str]
    held: list[Tensor] = field(default_factory=list)

    def start(self) -> None:
        self.said.append(f"gather {self.name}")

    def accumulate(self) -> None:
        self.said.append(f"compute {self.name}")


def test_the_next_input_travels_while_this_gradient_is_computed() -> None:
    said: list[str] = []
    late: list[Late] = [Step(name, said) for name in "abc"]
    accumulate(late)
    assert said == ["gather a", "gather b", "compute a", "gather c", "compute b", "compute c"]
    accumulate([])
