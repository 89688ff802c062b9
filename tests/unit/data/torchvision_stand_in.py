"""Three functions of torchvision, for transformers' video processors, which need it for nothing else.

Its `resize` of bytes on the host is torch's own interpolation, and its `normalize` a difference and a quotient.
"""

import sys
from enum import Enum
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate


class InterpolationMode(Enum):
    BICUBIC = "bicubic"
    BILINEAR = "bilinear"
    LANCZOS = "lanczos"


def resize(image: Tensor, size: list[int], interpolation: InterpolationMode, antialias: bool) -> Tensor:
    """[..., 3, height, width] to such a height and width."""
    whole = image.reshape(-1, *image.shape[-3:])
    if tuple(image.shape[-2:]) != tuple(size):
        whole = interpolate(whole, size=list(size), mode=interpolation.value, align_corners=False, antialias=antialias)
    return whole.reshape(*image.shape[:-2], *size)


def normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool = False) -> Tensor:
    """[..., 3, height, width] to mean 0 and deviation 1 over a data set."""
    del inplace
    return (image - torch.as_tensor(mean).view(3, 1, 1)) / torch.as_tensor(std).view(3, 1, 1)


def grayscale_to_rgb(image: Tensor) -> Tensor:
    assert image.shape[-3] == 3
    return image


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put it where transformers looks, for as long as `patch` lasts."""
    functional = ModuleType("torchvision.transforms.v2.functional")
    vars(functional).update(resize=resize, normalize=normalize, grayscale_to_rgb=grayscale_to_rgb)
    vars(functional).update(InterpolationMode=InterpolationMode)
    parents = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules = {name: ModuleType(name) for name in parents} | {functional.__name__: functional}
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(modules[above], last, module)
    import transformers.image_processing_backends as backends
    import transformers.models.qwen2_vl.video_processing_qwen2_vl as qwen2
    import transformers.video_processing_utils as videos

    bicubic = {3: InterpolationMode.BICUBIC}
    for module in (backends, qwen2, videos):
        patch.setattr(module, "tvF", functional, raising=False)
    patch.setattr(backends, "pil_torch_interpolation_mapping", bicubic)
