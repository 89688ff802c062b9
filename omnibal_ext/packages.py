"""How to install packages that are missing: `omnibal` without extras has the packer and the planner alone."""

import sys
from importlib.util import find_spec

EXTRAS = {
    "train": (
        *("torch", "megatron", "einops", "triton", "tensorboard", "typing_extensions"),
        *("sentencepiece", "tokenizers", "safetensors", "PIL", "transformers"),
    ),
    "video": ("av",),
    "audio": ("av", "soxr"),
    "tables": ("pyarrow",),
    "demo": ("sklearn",),
    "png": ("matplotlib",),
}
"""Modules that each extra of setup.py installs."""
NOT_IN_EXTRAS = ("accelerate", "datasets", "deepspeed", "peft", "trl")
"""Frameworks of examples/, which no extra installs."""


def missing_package(module: str) -> str:
    """The name of a missing module and how to install it; "" if it is installed, or no dependency of ours."""
    root = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if root in modules), "")
    module = "megatron.core" if root == "megatron" else root  # `megatron` is a namespace package
    if not (extra or root in NOT_IN_EXTRAS) or find_spec(module):
        return ""
    remedy = f"pip install 'omnibal[{extra}]'" if extra else f"pip install {root}"
    if module == "megatron.core" and sys.version_info < (3, 12):
        # Its wheel runs on Python 3.11, but its metadata excludes it.
        remedy = "pip install --no-deps --ignore-requires-python 'megatron-core>=0.19.2,<0.20'"
    return f"{module}, which is not installed: {remedy}"
