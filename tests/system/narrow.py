"""narrow.py BENCHMARK [argument...]: a benchmark with models a fourth as wide, whose figures say nothing, and soon."""

import importlib
import sys
from dataclasses import replace
from functools import partial

from benchmarks.two_ranks import Shape, profile
from omnibal_ext.errors import run_tool

FEWER = {"end_to_end.py": 2, "partition.py": 3, "peers.py": 2}
"""Layers of each part, where the benchmark's own layouts do not need all."""


def narrow(shape: Shape, layers: int | None) -> Shape:
    """The same model, narrower, with so many layers in each part."""
    parts = {
        name: replace(
            part,
            layers=layers or part.layers,
            hidden_size=part.hidden_size // 4,
            ffn_hidden_size=part.ffn_hidden_size // 4,
        )
        for name, part in (("vision", shape.vision), ("language", shape.language))
    }
    return replace(shape, **parts)


def main() -> None:
    name, *arguments = sys.argv[1:]
    benchmark = importlib.import_module(f"benchmarks.{name.removesuffix('.py')}")
    benchmark.profile = partial(profile, steps=1)
    if hasattr(benchmark, "SHAPE"):
        benchmark.SHAPE = narrow(benchmark.SHAPE, FEWER.get(name))
    if hasattr(benchmark, "SHAPES"):
        benchmark.SHAPES = tuple(narrow(shape, FEWER.get(name)) for shape in benchmark.SHAPES)
    sys.argv = [name, *arguments]
    run_tool(benchmark.main)


if __name__ == "__main__":
    main()
