"""What linear layers have in common."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A gradient that nobody reads."""
    make = torch.zeros if zero else torch.empty
    return make(shape, dtype=dtype, device="cuda", requires_grad=False)


class WeightGradStore:
    """Weight gradients that wait, first in first out."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        self.enabled = delay_wgrad_compute
        self.context: deque[tuple[tuple[Tensor, Tensor], Callable[..., Any]]] = deque()

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensors: tuple[Tensor, Tensor], function: Callable[..., Any]) -> None:
        self.context.append((tensors, function))

    def pop(self) -> Any:
        tensors, function = self.context.popleft()
        return function(*tensors)


class TransformerEngineBaseModule(torch.nn.Module):
    """Hooks of delayed weight gradients; a state beside the weights that is empty without FP8."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def start(self, delay_wgrad_compute: bool, fuse_wgrad_accumulation: bool, use_bias: bool) -> None:
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.fuse_wgrad_accumulation, self.use_bias = fuse_wgrad_accumulation, use_bias
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        with torch.no_grad():  # kernels are not recorded
            wgrad, bgrad = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = wgrad.to(self.weight.dtype)
        if self.use_bias and self.bias is not None and self.bias.grad is None:
            self.bias.grad = bgrad.to(self.bias.dtype)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or not state.numel()
