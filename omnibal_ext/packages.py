"""Packages that are not installed, and what brings them: `omnibal` by itself is the packer and the planner."""

import sys
from importlib.util import find_spec

EXTRAS = {
    "train": (
        *("torch", "megatron", "einops", "triton", "tensorboard", "typing_extensions"),
        *("sentencepiece", "tokenizers", "safetensors", "PIL", "transformers"),
    ),
    "video": ("av",),
    "tables": ("pyarrow",),
    "demo": ("sklearn",),
    "png": ("matplotlib",),
}
"""The modules of each extra of setup.py."""
NOT_IN_EXTRAS = ("accelerate", "datasets", "deepspeed", "peft", "trl")
"""Frameworks of examples/, which no extra brings."""


def missing_package(module: str) -> str:
    """The name of a module that is missing, and how to have it; "" if it is there, or none that we ask for."""
    root = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if root in modules), "")
    module = "megatron.core" if root == "megatron" else root  # a namespace, of which a part is ours
    if not (extra or root in NOT_IN_EXTRAS) or find_spec(module):
        return ""
    remedy = f"pip install 'omnibal[{extra}]'" if extra else f"pip install {root}"
    if module == "megatron.core" and sys.version_info < (3, 12):
        # Its wheel works, and by its metadata pip does not take it.
        remedy = "pip install --no-deps --ignore-requires-python 'megatron-core>=0.19.2,<0.20'"
    return f"{module}, which is not installed: {remedy}"
