"""The vision tower cut into stages with all of the chain, or whole on every rank beside the pipeline: predicted.

    python benchmarks/beside.py [--models qwen3-vl-8b] [--schedules 1f1b:2] [--iterations 8] [--seconds 4]

For every model on H100s of 72 GiB, the same packs for all columns; of every column the best of the schedules and of the
tensor-parallel sizes. "Text-only" is the language model alone, planned alike, without the tower's work. A frozen tower
encodes one iteration ahead. Everything is simulated from analytic costs; `beside_measured.py` trains both. The last
line is the median over models of the speed beside the pipeline over that of the cut.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from omnibal_ext.architectures.presets import preset
from omnibal_ext.console import print_json, print_table
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.tower import language_profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_plan
from omnibal_ext.layout.tower_layout import plan_beside
from omnibal_ext.layout.workload import PackedCorpus, pack_corpus
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes
from omnibal_ext.units import GIB

MEMORY = 72 * GIB
LAYOUTS = ("cut", "beside", "text-only", "cut, frozen", "beside, frozen")


def few_tiles(samples: int) -> Sizes:
    """LLaVA-like: mostly one tile, at most seven."""
    random = np.random.default_rng(0)
    tiles = random.choice([0, 1, 3, 4, 5, 7], samples, p=[0.03, 0.70, 0.11, 0.05, 0.05, 0.06])
    return _with_text(random, tiles, tiles, 170, 0.8, 4096)


def many_tiles(samples: int) -> Sizes:
    """Up to twelve tiles and a thumbnail; some text alone."""
    random = np.random.default_rng(0)
    shown = random.choice([1, 3, 5, 7, 9, 13], samples, p=[0.3, 0.15, 0.15, 0.15, 0.1, 0.15])
    tiles = np.where(random.random(samples) < 0.15, 0, shown)
    return _with_text(random, tiles, tiles, 220, 0.9, 8192)


def patches(samples: int) -> Sizes:
    """Images of 256 to 12000 patches, up to three a sample; a fifth of the samples is text alone."""
    random = np.random.default_rng(0)
    count = random.choice([0, 1, 2, 3], samples, p=[0.2, 0.6, 0.12, 0.08])
    images = np.clip(random.lognormal(np.log(2000), 0.7, (3, samples)), 256, 12000).astype(np.int64) // 4 * 4
    found = np.minimum((images * (count > np.arange(3)[:, None])).sum(axis=0), 24000)
    return _with_text(random, found, found / 1024, 220, 0.9, 8192)


def _with_text(
    random: np.random.Generator, tiles: np.ndarray, whole: np.ndarray, mean: int, spread: float, cap: int
) -> Sizes:
    text = np.maximum(8, random.lognormal(np.log(mean), spread, len(tiles))).astype(np.int64)
    return Sizes.from_arrays(tiles, np.minimum((256 * whole).astype(np.int64) + text, cap))


@dataclass(frozen=True)
class Case:
    """A model, its packs and its GPUs."""

    model: str
    corpus: Callable[[int], Sizes]
    vit_budget: int
    llm_budget: int
    samples: int
    """Of an iteration."""
    gpus: int
    tensor: tuple[int, ...]
    pipeline: int = 4


CASES = (
    Case("internvl3.5-8b", many_tiles, 30, 8192, 512, 32, (1, 2)),
    Case("qwen2.5-vl-7b", patches, 24576, 8192, 512, 32, (1, 2)),
    Case("qwen3-vl-8b", patches, 24576, 8192, 512, 32, (1, 2)),
    Case("qwen3-vl-32b", patches, 24576, 8192, 256, 32, (4,)),
    Case("qwen2.5-vl-72b", patches, 24576, 8192, 256, 64, (8,)),
    Case("internvit-6b+internlm2-20b", few_tiles, 9, 4096, 512, 32, (2,)),
)


def step_seconds(
    case: Case, tensor: int, schedules: list[tuple[str, int]], iterations: int, seconds: float
) -> dict[str, float]:
    """Of every layout the fastest of the schedules; infinite where none has a plan."""
    data = case.gpus // (tensor * case.pipeline)
    budgets = (case.vit_budget, case.llm_budget)
    sizes = case.corpus(12000)

    def packed(microbatches: int, replicas: int) -> PackedCorpus:
        counts = {"micro_batches": microbatches, "data_parallel_size": replicas}
        return pack_corpus(sizes, PackOptions("balanced", *budgets, seconds=0.5, **counts))

    microbatches = max(1, round(case.samples / packed(8, 1).samples.mean() / data))
    packs = packed(microbatches, data).workload(iterations).packs
    best = dict.fromkeys(LAYOUTS, float("inf"))
    for frozen in ((), ("vit", "projector")):
        ranks = tensor * case.pipeline
        profile = analytic_profile(
            preset(case.model),
            "h100",
            dict(zip(("tiles", "tokens"), budgets, strict=True)),
            tensor,
            data,
            frozen=frozen,
            replica_ranks=ranks,
        )
        for name, chunks in schedules:
            problem = LayoutProblem(profile, case.pipeline, microbatches, chunks, name, MEMORY, packs)
            plans = {"cut": (problem, find_plan), "beside": (problem, plan_beside)}
            if frozen:
                plans = {f"{layout}, frozen": plan for layout, plan in plans.items()}
            else:
                plans["text-only"] = (replace(problem, profile=language_profile(profile)), find_plan)
            for layout, (asked, plan) in plans.items():
                try:
                    best[layout] = min(best[layout], plan(asked, "joint", seconds=seconds)[1][0].step_seconds)
                except UserError:
                    continue
    return best


def main() -> None:
    """Plan, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[case.model for case in CASES], help="all, unless given")
    parser.add_argument("--schedules", default="1f1b:2,1f1b:4,zb_h1:2", help="name:chunks,...")
    parser.add_argument("--iterations", type=int, default=8, help="of each case")
    parser.add_argument("--seconds", type=float, default=4.0, help="of work to search each plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    schedules = [(one.split(":")[0], int(one.split(":")[1])) for one in arguments.schedules.split(",")]
    found = {}
    for case in CASES:
        if arguments.models and case.model not in arguments.models:
            continue
        sizes = [step_seconds(case, t, schedules, arguments.iterations, arguments.seconds) for t in case.tensor]
        found[case.model] = {layout: min(one[layout] for one in sizes) for layout in LAYOUTS}
    ratios = [steps["cut"] / steps["beside"] for steps in found.values()]
    if arguments.json:
        print_json(found)
        return
    rows = [
        (model, f"{s['cut']:.3f}", f"{s['beside']:.3f}", f"{s['cut'] / s['beside']:.3f}",
         *(f"{s['text-only'] / s[layout]:.3f}" for layout in LAYOUTS if layout != "text-only"))
        for model, s in found.items()
    ]  # fmt: skip
    columns = ("model", "cut s", "beside s", "beside / cut speed")
    shares = tuple(f"{layout}, of text-only" for layout in LAYOUTS if layout != "text-only")
    print_table("predicted steps", (*columns, *shares), rows)
    print(f"speed beside the pipeline over the cut, median: {statistics.median(ratios):.3f}x")


if __name__ == "__main__":
    main()
