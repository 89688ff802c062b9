"""narrow.py BENCHMARK [argument...]: a benchmark with models a fourth as wide, whose figures say nothing, and soon."""

import importlib
import sys
from dataclasses import replace
from functools import partial

from benchmarks.two_ranks import Shape, profile
from omnibal_ext.errors import run_tool


def narrow(shape: Shape) -> Shape:
    """The same layers, narrower."""
    parts = {
        name: replace(part, hidden_size=part.hidden_size // 4, ffn_hidden_size=part.ffn_hidden_size // 4)
        for name, part in (("vision", shape.vision), ("language", shape.language))
    }
    return replace(shape, **parts)


def main() -> None:
    name, *arguments = sys.argv[1:]
    benchmark = importlib.import_module(f"benchmarks.{name.removesuffix('.py')}")
    benchmark.profile = partial(profile, steps=1)
    if hasattr(benchmark, "SHAPE"):
        benchmark.SHAPE = narrow(benchmark.SHAPE)
    if hasattr(benchmark, "SHAPES"):
        benchmark.SHAPES = tuple(map(narrow, benchmark.SHAPES))
    sys.argv = [name, *arguments]
    run_tool(benchmark.main)


if __name__ == "__main__":
    main()
