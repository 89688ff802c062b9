"""Balanced packing against ISF and the padded baselines, on any sizes files: the paper's data table, speed and growth.

    python benchmarks/packing.py --sizes a.json b.json

Without --sizes it takes the lengths that OmniBal's authors published (folder $OMNIBAL_LENGTHS), or else a made-up
corpus. All methods pack the same samples in the same run; `benchmarks/packing_grid.py` has corpora that nothing was
tuned on. The last line is the ratio to ISF.
"""

import argparse
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.summary import Summary
from omnibal_ext.packing.options import METHODS, PackOptions
from omnibal_ext.packing.packers.budgets import choose_budgets
from omnibal_ext.sizes import Sizes

BUDGETS = ((9, 4096), (10, 4096), (14, 4096), (15, 4352), (18, 5376), (20, 5888))
GROWTH = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
PLAIN_SAMPLES = 200_000


def load(paths: Sequence[str]) -> tuple[Sizes, str]:
    """Return the corpus to pack, and its name."""
    folder = Path(os.environ.get("OMNIBAL_LENGTHS", Path(__file__).parents[2] / "shared" / "data" / "lengths"))
    files = list(paths) or sorted(str(path) for path in folder.glob("*.json"))
    if files:
        return Sizes.load(files), ", ".join(Path(file).stem for file in files)
    generator = np.random.default_rng(0)
    tiles = generator.choice([1, 3, 4, 5], 60_000, p=[0.1, 0.37, 0.01, 0.52])
    tokens = 256 * tiles + generator.lognormal(4, 0.6, 60_000).astype(np.int64) + 20
    return Sizes.from_arrays(tiles, tokens), "made-up corpus"


def measure(sizes: Sizes, folder: str, options: PackOptions) -> Summary:
    """Pack, dispatch and write; compilation was done by `main`."""
    return build_index(sizes, tempfile.mkdtemp(dir=folder), options)[1]


def measure_all(sizes: Sizes, folder: str) -> dict[tuple[str, int], Summary]:
    """Measure every method with one and with two microbatches, which other programs level."""
    options = {
        (method, micro_batches): PackOptions(method, *BUDGETS[-1], micro_batches=micro_batches, data_parallel_size=2)
        for method in METHODS
        for micro_batches in (1, 2)
    }
    return {case: measure(sizes, folder, one) for case, one in options.items()}


def isf_in_plain_python(sizes: Sizes, vit_budget: int, llm_budget: int, passes: int = 10) -> int:
    """Count the packs of ISF written with lists and dictionaries, as its authors released it (the slow baseline)."""
    pool = [{"vit_num": v, "token_num": t} for v, t in zip(sizes.tiles.tolist(), sizes.tokens.tolist(), strict=True)]
    generator, kept = random.Random(0), 0
    for last in [False] * passes + [True]:
        generator.shuffle(pool)
        left: list[dict[str, int]] = []
        group: list[dict[str, int]] = []
        tiles = tokens = 0
        for sample in [*pool, {"vit_num": vit_budget + 1, "token_num": 0}]:
            if tiles + sample["vit_num"] > vit_budget or tokens + sample["token_num"] > llm_budget:
                if last or tiles >= vit_budget or tokens >= llm_budget - 128:
                    kept += 1
                else:
                    left.extend(group)
                group, tiles, tokens = [], 0, 0
            group.append(sample)
            tiles += sample["vit_num"]
            tokens += sample["token_num"]
        pool = left
    return kept


def compare_methods(sizes: Sizes, folder: str, ranks: int, samples_per_pack: int) -> dict[str, Summary]:
    """Print the paper's data table at budgets chosen for the corpus; return the measures of each method."""
    best, _ = choose_budgets(sizes, samples_per_pack=samples_per_pack)
    results = {}
    for method in reversed(METHODS):
        options = PackOptions(method, best.vit_budget, best.llm_budget, data_parallel_size=ranks)
        results[method] = measure(sizes, folder, replace(options, samples_per_pack=samples_per_pack))
    rows = [
        (
            method, f"{r.samples_per_pack:.2f}", r.longest_tiles, r.longest_tokens, f"{r.pad_ratio:.3f}",
            f"{r.dist_ratio_vit:.4f}", f"{r.dist_ratio_llm:.4f}", f"{r.dist_ratio_attention:.4f}",
            f"{r.wait:.4f}", f"{r.spread_sizes:.2f}", f"{r.spread_sources:.2f}",
            f"{r.packs / r.lower_bound_packs:.4f}", f"{r.seconds:.2f}",
        )
        for method, r in results.items()
    ]  # fmt: skip
    columns = (
        "method", "samples a pack", "most tiles", "most tokens", "PadRatio", "DistRatio ViT", "LLM", "attention",
        "wait", "spread: sizes", "sources", "packs / bound", "s",
    )  # fmt: skip
    print_table(f"Methods at budgets {best.vit_budget}, {best.llm_budget} (auto), {ranks} ranks", columns, rows)
    return results


def compare_budgets(sizes: Sizes, folder: str, ranks: int) -> dict[tuple[int, int], tuple[Summary, Summary]]:
    """Print ISF against balanced at the published budgets; return both measures of each."""
    rows, results = [], {}
    for budgets in BUDGETS:
        isf, own = (
            measure(sizes, folder, PackOptions(method, *budgets, data_parallel_size=ranks))
            for method in ("isf", "balanced")
        )
        results[budgets] = (isf, own)
        ratios = (own.dist_ratio_vit, own.dist_ratio_llm, own.dist_ratio_attention)
        both = f"{isf.dist_ratio_vit:.4f} {isf.dist_ratio_llm:.4f}", " ".join(f"{ratio:.4f}" for ratio in ratios)
        rows.append((f"{budgets[0]}, {budgets[1]}", isf.lower_bound_packs, isf.packs, own.packs, *both))
    columns = ("budgets", "lower bound", "ISF packs", "balanced packs", "ISF DistRatio", "balanced, + attention")
    print_table("Packs and DistRatios at the published budgets", columns, rows)
    return results


def compare_speed(sizes: Sizes, folder: str, ranks: int, most_samples: int) -> tuple[float, float]:
    """Print seconds against the number of samples, resampled; return the ratio of rates to plain ISF, the exponent."""
    generator = np.random.default_rng(0)
    vit_budget, llm_budget = BUDGETS[4]
    plain = sizes.take(generator.integers(0, len(sizes), PLAIN_SAMPLES))
    begin = time.process_time()
    isf_in_plain_python(plain, vit_budget, llm_budget)
    plain_rate = PLAIN_SAMPLES / (time.process_time() - begin)
    rows, counts, seconds = [], [], []
    for count in (*(count for count in GROWTH if count < most_samples), most_samples):
        resampled = sizes.take(generator.integers(0, len(sizes), count))
        begin = time.process_time()
        result = measure(resampled, folder, PackOptions("balanced", vit_budget, llm_budget, data_parallel_size=ranks))
        cpu = time.process_time() - begin
        counts.append(count)
        seconds.append(cpu)
        gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        unit = f"{cpu / (count * np.log2(count)) * 1e9:.1f}"
        times = f"{result.seconds:.2f}", f"{cpu:.2f}", f"{count / cpu:,.0f}", unit
        rows.append((f"{count:,}", *times, f"{gigabytes:.2f}"))
    columns = (
        "samples", "s to closed index", "CPU s with measures", "samples / CPU s", "CPU ns / (n log2 n)",
        "peak GB of the process",
    )  # fmt: skip
    print_table("Growth of balanced packing, sizes to closed index", columns, rows)
    n, cpus = np.array(counts, np.float64), np.array(seconds)
    work = np.log(n * np.log(n))
    exponent = float(np.polyfit(work, np.log(cpus), 1)[0]) if len(counts) > 1 else float("nan")
    print(f"ISF in plain Python: {plain_rate:,.0f} samples / CPU s; balanced: {counts[-1] / seconds[-1]:,.0f}")
    print(
        f"{counts[-1]:,} samples cost {cpus[-1] / cpus[0]:.1f} times {counts[0]:,}, n log n is "
        f"{np.exp(work[-1] - work[0]):.1f} times; cost grows as (n log n)^{exponent:.2f}"
    )
    return counts[-1] / seconds[-1] / plain_rate, exponent


def main() -> None:
    """Compare, print, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--data-parallel-size", type=int, default=8)
    parser.add_argument("--samples-per-pack", type=int, default=4)
    parser.add_argument("--most-samples", type=int, default=GROWTH[-1], help="of the growth table")
    arguments = parser.parse_args()
    sizes, name = load(arguments.sizes)
    print(f"{name}: {len(sizes):,} samples, {int(sizes.tiles.sum()):,} tiles, {int(sizes.tokens.sum()):,} tokens")
    with tempfile.TemporaryDirectory() as folder:
        measure_all(sizes.take(np.arange(min(2000, len(sizes)))), folder)  # compile outside the clock
        methods = compare_methods(sizes, folder, arguments.data_parallel_size, arguments.samples_per_pack)
        compare_budgets(sizes, folder, arguments.data_parallel_size)
        speed, _ = compare_speed(sizes, folder, arguments.data_parallel_size, arguments.most_samples)
    packs = methods["balanced"].packs / methods["isf"].packs
    wait = methods["balanced"].wait / methods["isf"].wait
    print(f"ratio to ISF: packs {packs:.4f}, waiting {wait:.4f}, speed {speed:.1f} (of plain Python)")


if __name__ == "__main__":
    run_tool(main)
