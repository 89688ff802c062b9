"""Layout methods side by side, measured: plans by parameters, layers, profile, bmp and joint, trained in turns.

    python benchmarks/partition.py [--rounds 15]

Three models on two gloo ranks: ViT-heavy, even, and heavy in the language model. Each is profiled once, all plans come
from that profile, for the same packs, the same memory and schedule (1F1B). Recomputation: the fewest layers that fit;
joint chooses it together with the cut. Needs two idle cores. A round runs every plan once, in an order of its own; a
ratio is the median over rounds of both plans' seconds in the same round. Under two or three percent it is noise.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.two_ranks import Case, Packs, Shape, profile, sizes_of, train
from omnibal_ext.architectures import LanguageArchitecture, VisionArchitecture
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.recompute import recompute_all
from omnibal_ext.layout.search import find_layouts, make_plan

METHODS = ("parameters", "layers", "profile", "bmp", "joint")
MICROBATCHES = 6
ROOM = 0.45
"""Memory of a rank, between what the even cut needs with every layer recomputed (0) and with none (1)."""


def _shape(name: str, vision_layers: int, vision_width: int, language_layers: int, language_width: int) -> Shape:
    return Shape(
        name,
        VisionArchitecture(vision_layers, vision_width, 4, 4 * vision_width, patch_size=8, image_size=48),
        LanguageArchitecture(language_layers, language_width, 4, 2, 3 * language_width, vocab_size=512),
        vit_budget=8,
        llm_budget=256,
    )


SHAPES = (_shape("ViT-heavy", 7, 224, 3, 160), _shape("even", 5, 192, 4, 256), _shape("LLM-heavy", 4, 128, 6, 288))


def main() -> None:
    """Profile, plan, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="iterations of each plan (default %(default)s)")
    rounds = parser.parse_args().rounds
    ratios: dict[str, list[float]] = {method: [] for method in METHODS[:-1]}
    for shape in SHAPES:
        seconds = compare(shape, rounds)
        for method, found in ratios.items():
            pairs = zip(seconds[method], seconds["joint"], strict=True)
            found.append(statistics.median(other / joint for other, joint in pairs))
    names = ", ".join(shape.name for shape in SHAPES)
    for method, found in ratios.items():
        print(f"joint is faster than {method}: {', '.join(f'{ratio:.2f}x' for ratio in found)} ({names})")
    print(f"joint against the best other method: {min(map(min, ratios.values())):.2f}x at worst")


def compare(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Step seconds of every method's plan; equal plans are trained once. Prints the table."""
    costs, packs = profile(shape), _packs(shape)
    problem = LayoutProblem(costs, 2, MICROBATCHES, packs=sizes_of(packs))
    problem = replace(problem, memory_bytes=_memory(problem))
    plans = {method: make_plan(problem, find_layouts(problem, method)[:1], method) for method in METHODS}
    distinct = {plan.stages: Case(method, plan, packs) for method, plan in plans.items()}
    trained = dict(zip(distinct, train(shape, list(distinct.values()), rounds), strict=True))
    rows = []
    for method, plan in plans.items():
        found = trained[plan.stages]
        layers = " | ".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages)
        again = " | ".join(str(len(stage.recompute)) for stage in plan.stages)
        predicted, measured = plan.predicted["step_seconds"], statistics.median(found.seconds)
        peak = f"{max(found.peak_bytes) / 2**20:.0f}"
        rows.append((method, layers, again, f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}", peak))
    columns = ("method", "layers", "recomputed", "predicted ms", "measured ms", "peak MiB")
    print_table(f"{shape.name}, {problem.memory_bytes / 2**20:.0f} MiB a rank", columns, rows)
    return {method: trained[plan.stages].seconds for method, plan in plans.items()}


def _memory(problem: LayoutProblem) -> float:
    """Enough for every method's cut with all layers recomputed, too little for the even cut with none."""
    cuts = [find_layouts(problem, method)[0].layout for method in METHODS[:-1]]
    least = max(max(problem.stage_peak_bytes(recompute_all(problem, cut.edges))) for cut in cuts)
    most = max(problem.stage_peak_bytes(cuts[METHODS.index("profile")]))
    return least + ROOM * max(most - least, 0.1 * least)


def _packs(shape: Shape, seed: int = 0) -> Packs:
    """Nearly full packs, as balanced packing makes them; three samples each."""
    random = np.random.default_rng(seed)
    packs = []
    for _ in range(MICROBATCHES):
        tiles = int(random.integers(shape.vit_budget - 2, shape.vit_budget + 1))
        tokens = int(random.integers(shape.llm_budget * 9 // 10, shape.llm_budget + 1))
        packs.append((tiles, (tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4)))
    return tuple(packs)


if __name__ == "__main__":
    run_tool(main)
