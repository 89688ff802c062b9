"""How preprocessing scales: the same corpus with one worker and with two, in turns; the last line is the ratio."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.demo.data import make_demo_data
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool


def seconds_with(workers: int, source: Path, recipe: Recipe, output: Path) -> float:
    """Wall-clock seconds from opening the inputs to the finished dataset."""
    started = time.perf_counter()
    preprocess(open_job([source], recipe, output), workers)
    return time.perf_counter() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=20, help="of 1,000 demo conversations (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest run of each counts (default %(default)s)")
    arguments = parser.parse_args()
    best = {1: float("inf"), 2: float("inf")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo_data(folder, samples=1000, heldout_samples=1, seed=0)
        source = folder / "corpus.jsonl"
        source.write_bytes((folder / "train.jsonl").read_bytes() * arguments.copies)
        recipe = Recipe(folder, folder / "tokenizer.model", "internlm2-chat", Tiling(32, max_tiles=32), 4)
        for repeat in range(arguments.repeats):
            for workers in (1, 2):
                seconds = seconds_with(workers, source, recipe, folder / f"dataset-{workers}-{repeat}")
                best[workers] = min(best[workers], seconds)
    samples = 1000 * arguments.copies
    rows = [(workers, f"{seconds:.2f}", f"{samples / seconds:,.0f}") for workers, seconds in best.items()]
    print_table(f"{samples:,} conversations", ("workers", "seconds", "samples/s"), rows)
    print(f"two workers against one: {best[1] / best[2]:.2f}x ({best[1] / best[2] / 2:.0%} of linear)")


if __name__ == "__main__":
    run_tool(main)
