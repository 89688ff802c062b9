"""Weights by the names that they have in checkpoints, whichever kernels hold them."""

from collections.abc import Iterator

import torch

from megatron.vlm.models.specs import NORMS_INSIDE


def weights_by_checkpoint_name(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As `named_parameters`; norms inside projections go by the names of norms in front of them."""
    for found, weight in module.named_parameters():
        name = found
        for inside, before in NORMS_INSIDE.items():
            name = name.replace(inside, before)
        yield name, weight
