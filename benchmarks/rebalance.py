"""Batches balanced as they come: how level random ones become, what crosses nodes, how long a plan takes.

    python benchmarks/rebalance.py
    python benchmarks/rebalance.py --orchmllm     # two minutes

Random samples of a made-up instruction corpus, so many a rank, on nodes of eight. `wait` is the share of a phase's time
that ranks wait for the fullest one (DistRatio), as read, dealt the longest first, and ours; `fullest` is that rank over
what it must have (the mean, or the longest sample, in whole tiles); `across` is the share of tokens' bytes that cross
nodes, with batches left where they are numbered and where ours are placed. The last line is the ratio of the steps'
seconds, vision and then language, ours over as read.

`--orchmllm`: the setting that OrchMLLM's abstract gives (arXiv 2503.23830): 84B parameters, three modalities, 2,560
H100, MFU 41.6%, up to 3.1 times Megatron-LM. Nothing else is known of it, and all else is assumed: Qwen2.5-Omni's audio
encoder, InternViT-6B and Qwen2.5-72B (79B), a made-up mix of words, images and sounds, eight samples a GPU and step,
analytic costs, bf16. `sharded`: weights are gathered as they are needed (ZeRO-3), hidden behind computing, all layers
recomputed, every phase waits for its fullest GPU. `planned`: tensor parallel 4, pipeline 8 with two chunks; packed
offline, searched cuts, as few layers recomputed as fit 80 GB. The baseline is the same pipeline with padded batches of
four random samples, cut by parameters, all recomputed. MFU counts no padding and nothing twice.
"""

import argparse
import heapq
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.architectures.presets import preset
from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import DEVICES, analytic_profile
from omnibal_ext.costs.operations import ModelOperations
from omnibal_ext.costs.profile import LayerCost
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.sweep import Setting, judge_setting
from omnibal_ext.layout.workload import pack_corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.packs import LOADS
from omnibal_ext.rebalance.phases import Phase, phases_of
from omnibal_ext.rebalance.plan import PhaseInput, place_batches, plan_step
from omnibal_ext.sizes import Sizes

A_NODE = 8
SHAPES = ((8, 4), (32, 4), (256, 4), (8, 16), (32, 16), (256, 16))
BYTES_A_TILE, BYTES_A_TOKEN, BYTES_OF_FEATURES = 3 * 448 * 448.0, 16.0, 256 * 8192.0


def fraction_across_nodes(rank_of: Ints, sources: Sequence[tuple[Ints, Floats]], ranks_per_node: int) -> float:
    """Return the fraction of all bytes that go to another node, if each sample runs on rank `rank_of` [N]."""
    across = sum(float(size[rank_of // ranks_per_node != home // ranks_per_node].sum()) for home, size in sources)
    return across / max(1.0, sum(float(size.sum()) for _, size in sources))


def corpus(samples: int, seed: int) -> tuple[Ints, Ints]:
    """Tiles and tokens: most samples have one tile, some up to seven, few none."""
    random = np.random.default_rng(seed)
    tiles = random.choice([0, 1, 3, 4, 5, 7], samples, p=[0.03, 0.70, 0.11, 0.05, 0.05, 0.06])
    text = np.maximum(8, random.lognormal(np.log(170), 0.8, samples)).astype(np.int64)
    return tiles, np.minimum(256 * tiles + text, 4096)


def longest_first(seconds: Floats, ranks: int) -> Ints:
    """The baseline: each sample to the lightest rank, the longest first."""
    lightest = [(0.0, rank) for rank in range(ranks)]
    place = np.zeros(len(seconds), np.int64)
    for sample in np.argsort(-seconds, kind="stable"):
        load, place[sample] = lightest[0]
        heapq.heapreplace(lightest, (load + seconds[sample], place[sample]))
    return place


def least(phase: Phase, units: Ints, ranks: int) -> float:
    """What the fullest rank has at least."""
    seconds = phase.seconds(units)
    mean = float(seconds.sum()) / ranks if phase.quadratic else phase.linear * math.ceil(units.sum() / ranks)
    return max(mean, float(seconds.max()))


def measure(ranks: int, each: int, draws: int, phases: dict[str, Phase]) -> tuple[list[float], float, float]:
    """A row of the table; seconds of the steps as read, and ours."""
    home, rows, read, ours, seconds = np.repeat(np.arange(ranks), each), [], 0.0, 0.0, []
    for seed in range(draws):
        tiles, tokens = corpus(ranks * each, seed)
        needs = {
            "vision": PhaseInput(phases["vision"], tiles, tiles * BYTES_A_TILE),
            "language": PhaseInput(
                phases["language"], tokens, tokens * BYTES_A_TOKEN, {"vision": tiles * BYTES_OF_FEATURES}
            ),
        }
        began = time.perf_counter()
        placed = plan_step(home, needs, ranks, A_NODE)
        seconds.append(time.perf_counter() - began)
        row = []
        for name, need in needs.items():
            first = longest_first(need.phase.seconds(need.units), ranks)
            for place in (home, first, placed[name].rank_of):
                row.append(wait(need.phase.of_batches(need.units, place, ranks)[None, :, None]))
            row.append(placed[name].after / least(need.phase, need.units, ranks))
            read, ours = read + placed[name].before, ours + placed[name].after
        batch, sources = phases["language"].assign(tokens, ranks), [(home, tokens.astype(np.float64))]
        there = place_batches(batch, sources, ranks, A_NODE)[batch]
        row += [fraction_across_nodes(place, sources, A_NODE) for place in (batch, there)]
        rows.append(row)
    return [*np.mean(rows, axis=0).tolist(), 1e3 * float(np.median(seconds))], read, ours


MODEL = replace(preset("internvl2.5-78b"), further=preset("qwen2.5-omni-7b").further)
H100, A_RANK, TILES, TOKENS, FRAMES_OF_PACKS = DEVICES["h100"], 8, 24, 8192, 12_000
STEPS_PACKED, STEPS_PLACED, TENSOR, PIPELINE, ORCHMLLM_GPUS = 6, 2, 4, 8, 2560


def three_modalities(samples: int) -> Sizes:
    """Words alone, images, sounds, and both; an image has up to 13 tiles of 256 tokens, a second 25 tokens."""
    random = np.random.default_rng(0)
    kind = random.choice(4, samples, p=[0.3, 0.3, 0.3, 0.1])
    tiles = random.choice([1, 3, 4, 5, 7, 13], samples, p=[0.3, 0.2, 0.15, 0.15, 0.1, 0.1]) * np.isin(kind, (1, 3))
    frames = np.minimum(random.lognormal(6.6, 0.8, samples).astype(np.int64) + 8, 6000) * np.isin(kind, (2, 3))
    words = np.minimum(random.lognormal(5.2, 0.8, samples).astype(np.int64) + 8, 4000)
    return Sizes.from_arrays(tiles, np.minimum(words + 256 * tiles + frames // 4, TOKENS), frames=frames)


def recomputing(cost: LayerCost) -> LayerCost:
    """The cost of a layer whose backward runs its forward again."""
    forward, backward = cost.forward_fit, cost.backward_fit
    fit = backward and forward and (backward[0] + forward[0], backward[1] + forward[1], backward[2] + forward[2])
    return replace(cost, backward_seconds=cost.backward_seconds + cost.forward_seconds, backward_fit=fit)


def sharded(sizes: Sizes, gpus: int) -> dict[str, float]:
    """Seconds a sample, times GPUs, with sharded weights: batches as read, balanced as they come, packed offline."""
    profile = analytic_profile(MODEL, "h100", {"tiles": TILES, "tokens": TOKENS, "frames": FRAMES_OF_PACKS}, 1, gpus)
    again = {kind: recomputing(profile.layers[kind]) for kind in ("audio", "vit", "llm")}
    costs = PackCosts.of_profile(replace(profile, layers=profile.layers | again))
    home, nothing, read, ours = np.repeat(np.arange(gpus), A_RANK), np.zeros(gpus * A_RANK), 0.0, 0.0
    for step in range(STEPS_PLACED):
        here = sizes.take(np.arange(step * len(home), (step + 1) * len(home)))
        units = {"audio": here.more["frames"], "vision": here.tiles, "language": here.tokens}
        needs = {name: PhaseInput(phase, units[name], nothing) for name, phase in phases_of(costs).items()}
        placed = plan_step(home, needs, gpus, A_NODE).values()
        read, ours = read + sum(one.before for one in placed), ours + sum(one.after for one in placed)
    packed = pack_corpus(sizes, PackOptions("balanced", TILES, TOKENS, {"frames": FRAMES_OF_PACKS}, 1, gpus))
    seconds = rank_loads(packed.iterations, costs.waited_for(packed.loads, (*LOADS, "frames"), one_sum=True))
    samples, step_seconds = STEPS_PLACED * A_RANK, float(seconds.max(axis=1).mean())
    return {
        "sharded, as read": read / samples,
        "sharded, balanced as they come": ours / samples,
        "sharded, packed offline": step_seconds * gpus / packed.mean_samples,
    }


def planned(sizes: Sizes, gpus: int, packing: str, method: str, recompute: str, seconds: float) -> float:
    """Seconds a sample, times GPUs, of a pipeline."""
    ranks = gpus // TENSOR // PIPELINE
    setting = Setting(TENSOR, PIPELINE, ranks, 2, "1f1b", TILES, TOKENS)
    a_pack = 4 if packing == "random" else 0.97 * TOKENS / float(sizes.tokens.mean())
    microbatches = round(gpus * A_RANK / a_pack / ranks / PIPELINE) * PIPELINE
    options = PackOptions(packing, TILES, TOKENS, {"frames": FRAMES_OF_PACKS}, microbatches, ranks)
    work = pack_corpus(sizes, options)
    frames = max(FRAMES_OF_PACKS, int(work.loads[:, work.further["frames"]].max()))
    profile = analytic_profile(
        MODEL, "h100", {"tiles": work.vit_budget, "tokens": work.llm_budget, "frames": frames}, TENSOR, ranks
    )
    outcome = judge_setting(setting, profile, work, H100.memory_bytes, method, seconds, recompute)
    return gpus / outcome.samples_per_second


def orchmllm(gpus: int, seconds: float) -> dict[str, float]:
    """MFU of each way to train the same samples."""
    sizes, counts = three_modalities(STEPS_PACKED * gpus * A_RANK), ModelOperations.of(MODEL)
    tokens = sizes.tokens.astype(np.float64)
    units = {"tiles": sizes.tiles, "tokens": tokens, **sizes.more}
    sums = {size: float(values.sum()) for size, values in units.items()}
    needed = counts.total(sums, float((tokens**2).sum()), sums["tokens"]) / len(sizes) / H100.flops
    found = {"Megatron, random padded batches": planned(sizes, gpus, "random", "parameters", "full", 0.0)}
    found |= sharded(sizes, gpus)
    found["planned, packed offline"] = planned(sizes, gpus, "balanced", "joint", "fewest", seconds)
    return {name: needed / taken for name, taken in found.items()}


def print_orchmllm(found: dict[str, float]) -> None:
    """The table; the last line is the ratio of balancing as it comes over the baseline."""
    baseline, *_ = found.values()
    rows = [(name, f"{mfu:.3f}", f"{mfu / baseline:.2f}") for name, mfu in found.items()]
    rows.append(("OrchMLLM, published", "0.416", "up to 3.1"))
    print_table("OrchMLLM's setting, simulated", ("", "MFU", "times Megatron"), rows)
    print(f"balanced as they come over as read: {found[rows[2][0]] / found[rows[1][0]]:.2f}")


def main() -> None:
    """Print the table, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=60, help="random batches of each shape")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many of the shapes, the first ones")
    parser.add_argument("--orchmllm", action="store_true", help="its published setting in place of the table")
    arguments = parser.parse_args()
    if arguments.orchmllm:
        print_orchmllm(orchmllm(ORCHMLLM_GPUS, 4.0))
        return
    phases = phases_of(PackCosts.of_model())
    measure(8, 4, 1, phases)  # compile outside the clock
    rows, read, ours = [], 0.0, 0.0
    for ranks, each in SHAPES[: arguments.shapes]:
        row, before, after = measure(ranks, each, arguments.draws, phases)
        rows.append((ranks, each, *(f"{value:.3f}" for value in row[:-1]), f"{row[-1]:.1f}"))
        read, ours = read + before, ours + after
    columns = (
        "ranks", "samples each", "vision: wait as read", "longest first", "ours", "fullest", "language: wait as read",
        "longest first", "ours", "fullest", "across nodes", "placed", "ms a plan",
    )  # fmt: skip
    print_table("Batches balanced as they come", columns, rows)
    print(f"seconds of steps, ours over as read: {ours / read:.3f}")


if __name__ == "__main__":
    run_tool(main)
