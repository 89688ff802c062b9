"""Packaging of OmniBal: `omnibal_ext` (the deciding part) and `megatron.vlm` (the training part)."""

from setuptools import setup

setup(
    name="omnibal",
    version="0.1.0",
    description="Balanced training of vision-language models on Megatron Core",
    python_requires=">=3.11",
    # Named one by one: `megatron` is a namespace shared with pip's megatron-core and must not be claimed here.
    packages=[
        "omnibal_ext",
        "omnibal_ext.architectures",
        "omnibal_ext.costs",
        "omnibal_ext.packing",
        "omnibal_ext.launch",
        "omnibal_ext.layout",
        "megatron.vlm",
        "megatron.vlm.flags",
        "megatron.vlm.models",
        "megatron.vlm.data",
        "megatron.vlm.hf",
        "megatron.vlm.preflight",
        "megatron.vlm.pipeline",
        "megatron.vlm.profiling",
    ],
    install_requires=[
        "numpy>=1.26,<3",
        "numba>=0.60,<1",
        "rich>=13,<16",
        "torch>=2.8,<3",
        # The cp311 wheel is published but its metadata asks for 3.12: scripts/setup.sh installs it there.
        'megatron-core>=0.19.2,<0.20; python_version >= "3.12"',
        # What megatron-core imports on a machine without CUDA.
        "packaging>=24",
        "einops>=0.8,<1",
        "psutil>=6,<8",
        "triton>=3.4,<4; platform_system == 'Linux'",
        "tensorboard>=2.18,<3",
        "typing_extensions>=4.12,<5",
        "sentencepiece>=0.2.3,<0.3",
        "pillow>=11,<14",
    ],
    extras_require={
        "hf": ["tokenizers>=0.22,<1", "safetensors>=0.5,<1"],
        "demo": ["scikit-learn>=1.5,<2"],
        "test": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff>=0.12,<0.18",
            "mypy>=1.16,<3",
            # Oracles: Hugging Face's own templates and models.
            "tokenizers>=0.22,<1",
            "transformers>=4.57,<6",
            "jinja2>=3.1,<4",
        ],
    },
)
