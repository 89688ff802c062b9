"""Adam that keeps its states in other precisions, and operations on many tensors at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam

__all__ = [
    "FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]  # fmt: skip


class FusedSGD(torch.optim.SGD):
    """torch's, in one kernel."""


def multi_tensor_applier(op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(_: int, __: Tensor, lists: list[list[Tensor]], per_tensor: bool = False) -> tuple[Tensor, Any]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else None


def multi_tensor_scale(_: int, __: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale
