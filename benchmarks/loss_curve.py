"""What the order of packs does to the loss curve: the demo trained on the same samples in three orders.

    bash scripts/quickstart.sh                      # makes data, profile and plan
    python benchmarks/loss_curve.py [--quickstart runs/quickstart] [--epochs 3] [--seeds 0]

    ours        even packs; an iteration is of packs from different parts of the corpus (`order_packs`)
    alike       packs as they are found; an iteration is of packs that are alike in the sum of tiles, tokens and
                attention, each over its mean, as groups of one level are
    random      the same packs as alike, in random order

All train the same model from the same weights, with as many packs an iteration, on the quickstart's two replicas.
`loss` is the deviation of an iteration's loss from its trend, relative: of log(loss) about the mean of the `TREND`
iterations on either side, of all epochs but the first. `tiles` and `samples` are the deviations of what iterations
hold, over the mean. The last line is the ratio of ours to alike.

    python benchmarks/loss_curve.py --narrow-first 32 [--epochs 3] [--seeds 0 1 2]

measures a curriculum instead. Packs hold 75 tokens a rank, an iteration 16 of them; 4% of the samples, with 11% of the
tokens, are longer and run on both ranks. Each seed trains from the same weights with such iterations only, and with the
first 32 of narrow packs (`omnibal pack --narrow-first`). Held-out losses of the same iterations are compared; ±
is the standard error of the mean difference over seeds. The last line is the ratio of the held-out losses at the end.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex, write_index
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import TILES, LoadedPacks, PackList
from omnibal_ext.run_metrics import evaluations, training_intervals

ROOT = Path(__file__).resolve().parents[1]
ORDERS = ("ours", "alike", "random")
TREND = 8
SETTINGS = {
    "lr": "3e-3",
    "min-lr": "1e-4",
    "lr-decay-style": "cosine",
    "lr-warmup-fraction": "0.1",
    "init-method-std": "0.1",
    "adam-beta2": "0.95",
    "weight-decay": "0.01",
    "clip-grad": "1.0",
    "log-interval": "1",
}
"""Those of the quickstart."""
WIDE = ("--llm-budget", 75, "--vit-budget", 12, "--widths", "1,2", "--micro-batches", 8, "--data-parallel-size", 2)


def alike(loads: Ints, batch: int, seed: int) -> Ints:
    """Order packs so that those of an iteration are alike in all loads; packs that fill no iteration come last."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(loads))
    whole = order[: len(order) // batch * batch]
    whole = whole[np.argsort((loads / np.maximum(1, loads.mean(axis=0))).sum(axis=1)[whole], kind="stable")]
    return np.concatenate([generator.permutation(whole.reshape(-1, batch)).ravel(), order[len(whole) :]])


def pack(corpus: Corpus, like: PackedIndex, folder: Path, order: str, seed: int) -> PackedIndex:
    """Pack as `like` was, and in the `order`."""
    names = ("vit_budget", "llm_budget", "micro_batches", "data_parallel_size", "pipeline_model_parallel_size")
    options = PackOptions(**{name: like.manifest[name] for name in names}, seed=seed)
    built_from = like.manifest["built_from"]
    if order == "ours":
        return build_index(corpus, folder, options, built_from)[0]
    found, _ = build_index(corpus, folder, replace(options, seconds=0.0), built_from)
    loads, batch = np.array(found.loads), found.global_batch
    packs = PackList(np.array(found.pack_offsets), np.array(found.sample_ids))
    chosen = alike(loads, batch, seed) if order == "alike" else np.random.default_rng(seed).permutation(len(packs))
    manifest = {name: value for name, value in found.manifest.items() if name not in ("checksums", "sha256")}
    made = LoadedPacks(packs.reordered(chosen), loads[chosen])
    return write_index(folder, [made], lambda: (manifest, None), (), over=True)


def run(tool: str, *words: object) -> None:
    """Run one of the tools; raises UserError where it fails."""
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"tools/{tool}: failed: {done.stderr[-2000:]}")


def train(quickstart: Path, folder: Path, epochs: float, seed: int, *more: object) -> Path:
    """Train the demo on the packs in `folder`, with `more` flags; return the file of its metrics."""
    words = ["--model", "tiny", "--from-scratch", "--progress", "--no-save", "--data", quickstart / "train"]
    words += ["--packs", folder / "packs", "--run-dir", folder / "run", "--epochs", epochs, "--nproc-per-node", 2]
    settings = {**SETTINGS, "seed": 1234 + seed}
    run("launch.py", *words, *more, "--", *(word for name, value in settings.items() for word in (f"--{name}", value)))
    return folder / "run" / "metrics.jsonl"


def train_narrow_first(quickstart: Path, iterations: int, epochs: int, seeds: Sequence[int]) -> list[dict[int, float]]:
    """Held-out losses by iteration: of each seed with iterations of all widths, then of each with narrow ones first."""
    folder, found = quickstart / "loss-curve", []
    run("pack_data.py", "--data", quickstart / "heldout", "--output-dir", folder / "held-out", *WIDE)
    held_out = ("--eval-data", quickstart / "heldout", "--eval-packs", folder / "held-out")
    for first in (0, iterations):
        for seed in seeds:
            own = folder / f"narrow-{first}-{seed}"
            order = ("--narrow-first", first, "--seed", seed)
            run("pack_data.py", "--data", quickstart / "train", "--output-dir", own / "packs", *WIDE, *order)
            metrics = train(quickstart, own, epochs, seed, "--analytic", "h100", *held_out)
            found.append({iteration: line["loss"] for iteration, line in evaluations(metrics).items()})
    return found


def print_narrow_first(found: Sequence[Mapping[int, float]]) -> None:
    """Print a row for each evaluation that all runs have, one for their ends, and the ratio there."""
    common = [number for number in sorted(found[0]) if all(number < max(each) and number in each for each in found)]
    rows = []
    for number in (*common, None):
        losses = np.array([each[number or max(each)] for each in found]).reshape(2, -1)
        apart, mean = losses[1] - losses[0], losses.mean(axis=1)
        error = f" ± {apart.std(ddof=1) / np.sqrt(len(apart)):.4f}" if len(apart) > 1 else ""
        rows.append((number or "end", *(f"{loss:.4f}" for loss in mean), f"{apart.mean():+.4f}{error}"))
    print_table("Held-out loss", ("iteration", "all widths", "narrow first", "difference"), rows)
    print(f"ratio of the held-out loss at the end, narrow first to all widths: {mean[1] / mean[0]:.3f}")


def about_trend(losses: Floats, first: int) -> float:
    """Return the deviation of log(loss) from the mean of its neighbours, from iteration `first` on.

    A mean of 2 `TREND` neighbours varies too: 1 / (2 `TREND`) of the variance of a loss is not the loss' own.
    """
    logs = np.log(losses)
    window = np.ones(2 * TREND + 1) / (2 * TREND)
    window[TREND] = 0.0
    apart = logs[TREND:-TREND] - np.convolve(logs, window, "valid")
    return float(np.sqrt((apart[max(0, first - TREND) :] ** 2).mean() / (1 + 1 / (2 * TREND))))


def spreads(index: PackedIndex) -> tuple[float, float]:
    """Return the deviations of what iterations hold, over the mean: tiles and samples."""
    batch = index.global_batch
    values = np.stack([np.asarray(index.loads)[:, TILES], np.diff(index.pack_offsets)], axis=1)
    iterations = values[: len(values) // batch * batch].reshape(-1, batch, 2).sum(axis=1)
    tiles, samples = (iterations.std(axis=0) / iterations.mean(axis=0)).tolist()
    return tiles, samples


def main() -> None:
    """Train, print, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=ROOT / "runs" / "quickstart", help="folder of quickstart.sh")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of packs, orders and first weights")
    parser.add_argument(
        "--narrow-first", type=int, metavar="N", help="measure so many iterations of narrow packs first"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.narrow_first:
        print_narrow_first(
            train_narrow_first(arguments.quickstart, arguments.narrow_first, arguments.epochs, arguments.seeds)
        )
        return
    like = PackedIndex.open(arguments.quickstart / "replicas" / "packs-balanced")
    plan = arguments.quickstart / "replicas" / "balanced" / "plan.json"
    corpus = Corpus.of_dataset(arguments.quickstart / "train", ())
    found = {}
    for order in ORDERS:
        each = []
        for seed in arguments.seeds:
            folder = arguments.quickstart / "loss-curve" / f"{order}-{seed}"
            index = pack(corpus, like, folder / "packs", order, seed)
            metrics = train(arguments.quickstart, folder, arguments.epochs, seed, "--plan", plan)
            losses = np.array([line["loss"] for line in training_intervals(metrics)])
            first = index.num_packs // index.global_batch
            each.append([about_trend(losses, first), *spreads(index), float(losses[-first // 4 :].mean())])
        found[order] = np.mean(each, axis=0).tolist()
    if arguments.json:
        print_json(found)
        return
    rows = [(order, *(f"{figure:.4f}" for figure in found[order])) for order in ORDERS]
    print_table("Deviation of iterations", ("order", "loss", "tiles", "samples", "mean loss at the end"), rows)
    print(f"ratio of the loss curve's spread, ours to alike: {found['ours'][0] / found['alike'][0]:.3f}")


if __name__ == "__main__":
    run_tool(main)
