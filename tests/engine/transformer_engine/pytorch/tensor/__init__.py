"""Tensors in eight bits."""

import torch


class QuantizedTensor(torch.Tensor):
    """No weight of ours is one."""
