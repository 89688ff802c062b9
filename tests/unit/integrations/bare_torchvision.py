"""PyPI's torchvision is built for CUDA, and its compiled part is not loaded by a torch without. Importing this before
transformers leaves it out: images are read by Pillow. torchaudio, where it is not installed, is an empty module."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

if torch.version.cuda is None and find_spec("torchvision"):
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
    import torchvision.io

    def decode_image(given: Any, mode: Any = None, **_: Any) -> torch.Tensor:
        """RGB [3, height, width] of a path or of bytes."""
        opened = Image.open(BytesIO(bytes(given.numpy())) if isinstance(given, torch.Tensor) else given)
        return torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)

    torchvision.io.decode_image = decode_image
if find_spec("torchaudio") is None:
    sys.modules["torchaudio"] = module_from_spec(ModuleSpec("torchaudio", None))
